"""Whatever a client sends is its own mistake or answered: never a 5xx, and always JSON or events."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pipelines.service.scripted import MODEL, THINKS, world

CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "n": 2,
    "logprobs": True,
    "top_logprobs": 1,
    "response_format": {"type": "text"},
    "seed": 1,
    "chat_template_kwargs": {"a": 1},
    "stop_token_ids": [3],
    "max_tokens": 5,
    "temperature": 0.5,
    "reasoning_effort": "low",
}
TEXT = {
    "model": MODEL,
    "prompt": ["Hi", "Ho"],
    "max_tokens": 3,
    "logprobs": 1,
    "n": 2,
    "stream": True,
    "stop": "x",
}
MESSAGE = {
    "model": MODEL,
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "Be kind."}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
        {"role": "system", "content": "Note"},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "output_config": {"effort": "low"},
    "stream": True,
    "top_k": 3,
}
ENDPOINTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {name: MESSAGE[name] for name in ("model", "messages", "system", "tools")},
}
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "system", "tool", "text", "auto", "json_schema", "function", MODEL, "\0"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def places(value, path=()):
    """Every place of a body at which another value can stand."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(body, changes):
    body = json.loads(json.dumps(body))
    for (*way, last), value in changes:
        target = body
        try:
            for key in way:
                target = target[key]
            target[last] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    return body


@pytest.fixture(scope="module")
def here():
    with world("<think>a</think>b <tool_call>c", dialect=THINKS) as made:
        yield made


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_body_that_is_changed_is_right_before(here, path):
    assert here.http.post(path, json=ENDPOINTS[path]).status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_makes_the_service_fail(here, path, data):
    body = ENDPOINTS[path]
    change = st.tuples(st.sampled_from(sorted(places(body), key=str)), JSON)
    sent = changed(body, data.draw(st.lists(change, min_size=1, max_size=3)))
    answer = here.http.post(path, content=json.dumps(sent))
    assert answer.status_code < 500, answer.text
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        events = [event.split("data: ", 1)[1] for event in answer.text.split("\n\n") if event]
        assert all(event == "[DONE]" or "error" not in json.loads(event) for event in events)
    else:
        assert answer.json()


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_the_service_fail(here, path, raw):
    answer = here.http.post(path, content=raw)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]
