"""Text completions, models and CORS, asked with OpenAI's own client over a socket."""

from __future__ import annotations

import openai
import pytest

from tests.pipelines.service.scripted import MODEL, world


@pytest.fixture(scope="module")
def here():
    with world(lambda request: "".join(map(chr, request.token_ids)).upper()) as made:
        yield made


@pytest.fixture
def api(here):
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_prompt_is_completed_as_it_stands(here, api):
    answer = api.completions.create(model=MODEL, prompt="abc", seed=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ABC", "stop")
    assert answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)
    assert here.engine.requests[-1].sampling.max_tokens == 16


def test_several_prompts_have_their_choices_in_order(api):
    answer = api.completions.create(model=MODEL, prompt=["ab", "cde"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "AB"),
        (1, "AB"),
        (2, "CDE"),
        (3, "CDE"),
    ]
    assert answer.usage.prompt_tokens == 5


@pytest.mark.parametrize("prompt", [[97, 98], [[97, 98]]])
def test_a_prompt_may_be_token_ids(api, prompt):
    assert api.completions.create(model=MODEL, prompt=prompt).choices[0].text == "AB"


def test_a_stream_gives_the_same_text_and_the_usage_at_the_end(api):
    chunks = list(
        api.completions.create(
            model=MODEL, prompt="abcdefgh", stream=True, stream_options={"include_usage": True}, logprobs=1
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "ABCDEFGH"
    assert chunks[-2].choices[0].finish_reason == "stop"
    spelled = [chunk.choices[0].logprobs for chunk in chunks[:-2]]
    assert [each.tokens for each in spelled] == [list("ABC"), list("DEF"), list("GH")]
    assert [each.text_offset for each in spelled] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 16)


def test_log_probabilities_have_offsets_and_the_best_tokens(api):
    logprobs = api.completions.create(model=MODEL, prompt="abc", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["A", "B", "C"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] == {"A": -0.25, "B": -1.25}


@pytest.mark.parametrize(
    "change",
    [{"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"prompt": []}, {"prompt": [-1]}, {"prompt": ""}],
)
def test_what_cannot_be_done_is_refused(api, change):
    with pytest.raises(openai.BadRequestError):
        api.completions.create(**{"model": MODEL, "prompt": "abc", **change})


def test_the_model_and_its_other_names_are_listed(api):
    assert [(model.id, model.owned_by) for model in api.models.list()] == [
        (MODEL, "dflash-ray"),
        ("claude-local", "dflash-ray"),
    ]
    assert api.models.retrieve("claude-local").id == "claude-local"
    assert api.completions.create(model="claude-local", prompt="a").model == "claude-local"


def test_pages_of_other_origins_are_let_in_only_where_they_are_named(here):
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in here.http.options("/v1/models", headers=asked).headers
    with world(settings={"cors_origins": ["https://chat.example"]}) as open_to:
        allowed = open_to.http.options("/v1/chat/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        refused = open_to.http.post("/v1/chat/completions", content=b"{", headers={"origin": asked["origin"]})
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"
        other = open_to.http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert other.status_code == 403


def test_without_keys_a_strange_page_cannot_make_a_browser_ask(here):
    num_asked = len(here.engine.requests)
    body = {"model": MODEL, "prompt": "abc"}
    answer = here.http.post("/v1/completions", json=body, headers={"origin": "https://evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert len(here.engine.requests) == num_asked
