"""What the service refuses, in the form of the API that was asked, as its own client reads it."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import openai
import pytest

from dflash_engine.errors import BadSampling, EngineDead, PromptTooLong
from pipelines.service.errors import EngineBusy
from tests.pipelines.service.scripted import MAX_MODEL_LEN, MODEL, open_request, world

HELLO: Any = [{"role": "user", "content": "Hi"}]
CHAT: Any = {"model": MODEL, "messages": HELLO}
MESSAGE: Any = {**CHAT, "max_tokens": 5}
TEXT = {"model": MODEL, "prompt": "Hi"}
ENDPOINTS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/v1/messages", MESSAGE)]


@pytest.fixture(scope="module")
def here():
    with world(settings={"max_body_bytes": 20_000}) as made:
        yield made


def refused(here, path, body, status, **others):
    """The error object of a refusal, its form checked."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = here.http.post(path, content=raw, **others)
    assert answer.status_code == status, answer.text
    found = answer.json()
    if path.startswith("/v1/messages"):
        assert found["type"] == "error"
        assert found["request_id"] == answer.headers["request-id"]
        assert found["error"].keys() == {"type", "message"}
    else:
        assert found.keys() == {"error"}
        assert found["error"].keys() == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")
    return {**found["error"], "headers": answer.headers}


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=[path for path, _ in ENDPOINTS])
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b"[" * 5000, "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object(here, path, body, raw, said):
    error = refused(here, path, raw, 400)
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=[path for path, _ in ENDPOINTS])
@pytest.mark.parametrize(
    "change",
    [
        {"temperature": "warm"},
        {"temperature": -1},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"model": None},
        {"stream": "yes"},
        {"top_p": 2},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_its_name(here, path, body, change):
    error = refused(here, path, {**body, **change}, 400)
    assert next(iter(change)) in error["message"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            None,
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"logit_bias": {"a": 1}}, None),
        ({"logit_bias": {"1": 1000}}, None),
        ({"stop": [""]}, None),
        ({"n": 1000}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
    ids=str,
)
def test_openai_names_the_place_in_param(here, change, place):
    error = refused(here, "/v1/chat/completions", {**CHAT, **change}, 400)
    assert error["type"] == "invalid_request_error"
    if place is not None:
        assert error["param"] == place


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": None},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "He"}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"system": 5},
        {"tools": [{"name": "x", "input_schema": {}}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "any"}},
        {"temperature": 1.5},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"mcp_servers": [{}]},
    ],
    ids=str,
)
def test_anthropic_says_what_is_wrong(here, change):
    error = refused(here, "/v1/messages", {**MESSAGE, **change}, 400)
    assert error["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_found(here):
    assert refused(here, "/v1/chat/completions", {**CHAT, "model": "gpt"}, 404)["code"] == "model_not_found"
    assert refused(here, "/v1/messages", {**MESSAGE, "model": "gpt"}, 404)["type"] == "not_found_error"
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key="x") as api, pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt")
    with anthropic.Anthropic(base_url=here.url, api_key="x") as api, pytest.raises(anthropic.NotFoundError):
        api.messages.create(**{**MESSAGE, "model": "gpt"})


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(here):
    long = [{"role": "user", "content": "x" * 3000}]
    num_tokens = 3000 + len("()<user><assistant>")
    error = refused(here, "/v1/chat/completions", {**CHAT, "messages": long}, 400)
    assert error["code"] == "context_length_exceeded"
    assert re.findall(r"\d+", error["message"]) == [str(MAX_MODEL_LEN), str(num_tokens)]
    error = refused(here, "/v1/messages", {**MESSAGE, "messages": long}, 400)
    assert error["message"] == f"prompt is too long: {num_tokens} tokens > {MAX_MODEL_LEN - 1} maximum"
    error = refused(here, "/v1/completions", {**TEXT, "prompt": [1] * 2000}, 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=[path for path, _ in ENDPOINTS])
def test_a_body_over_the_limit_is_refused_by_its_header_and_by_its_bytes(here, path, body):
    large = json.dumps({**body, "user": "x" * 30_000}).encode()
    error = refused(here, path, large, 413)
    assert "20000 bytes" in error["message"]
    chunked = here.http.post(path, content=(part for part in (large[:15_000], large[15_000:])))
    assert chunked.status_code == 413


def test_unknown_paths_and_methods_answer_in_the_form_of_the_api(here):
    assert here.http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert here.http.get("/v1/messages").json()["type"] == "error"
    assert here.http.get("/v1/chat/completions").status_code == 405


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (BadSampling("logit_bias: token 9 does not exist"), 400, None),
        (PromptTooLong("the prompt has 9 tokens"), 400, None),
        (EngineBusy(3.2), 429, "4"),
        (EngineDead("a step failed: secret"), 503, "5"),
        (RuntimeError("secret"), 500, None),
    ],
    ids=["sampling", "length", "busy", "dead", "bug"],
)
def test_what_the_engine_raises_has_a_status_before_a_stream_begins(error, status, retry_after, stream):
    with world(error=error) as here:
        for path, body in ENDPOINTS:
            found = refused(here, path, {**body, "stream": stream}, status)
            assert found["headers"].get("retry-after") == retry_after
            assert "secret" not in found["message"]


def test_a_template_that_refuses_is_a_bad_request(here):
    refusing = {**CHAT, "messages": [{"role": "user", "content": "refuse me"}]}
    assert "not nice" in refused(here, "/v1/chat/completions", refusing, 400)["message"]


def test_a_full_queue_is_a_rate_limit_to_both_clients():
    settings = {"max_requests": 1, "retry_after_s": 7}
    with world(settings=settings, hold_at=0) as here, open_request(here.url, "/v1/chat/completions", CHAT):
        assert here.engine.holding.wait(20)
        with (
            openai.OpenAI(base_url=f"{here.url}/v1", api_key="x", max_retries=0) as api,
            pytest.raises(openai.RateLimitError) as one,
        ):
            api.chat.completions.create(**CHAT)
        with (
            anthropic.Anthropic(base_url=here.url, api_key="x", max_retries=0) as api,
            pytest.raises(anthropic.RateLimitError) as other,
        ):
            api.messages.create(**MESSAGE)
    assert one.value.response.headers["retry-after"] == "7"
    body: Any = other.value.body
    assert body["error"]["type"] == "rate_limit_error"
    assert len(here.engine.requests) == 1


def test_while_shutting_down_new_requests_get_503_and_health_says_so(here):
    with world() as draining:
        assert draining.http.get("/health").status_code == 200
        draining.app.state.service.drain()
        assert refused(draining, "/v1/chat/completions", CHAT, 503)["code"] == "shutting_down"
        assert refused(draining, "/v1/messages", MESSAGE, 503)["type"] == "overloaded_error"
        assert draining.http.get("/health").status_code == 503


def test_after_the_engines_death_health_fails_until_it_answers_again():
    with world(error=EngineDead("gone")) as here:
        refused(here, "/v1/chat/completions", CHAT, 503)
        assert here.http.get("/health").status_code == 503
        here.engine.error = None
        assert here.http.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert here.http.get("/health").status_code == 200
