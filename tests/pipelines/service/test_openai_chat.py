"""Chat completions, asked with OpenAI's own client over a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.pipelines.service.scripted import MAX_MODEL_LEN, MODEL, THINKS, TOOLS, world

HELLO: Any = [{"role": "user", "content": "Say hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
FORCED = '{"name": "weather", "arguments": {"city": "Bern"}}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def client(here, **settings):
    return openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0, **settings)


@pytest.fixture(scope="module")
def plain():
    with world() as here:
        yield here


def test_a_chat_is_answered_with_usage(plain):
    with client(plain) as api:
        answer = api.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    prompt = "()<user>Say hello<assistant>"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 13)
    assert answer.usage.total_tokens == len(prompt) + 13
    assert answer._request_id.startswith("req_")
    assert answer.id.removeprefix("chatcmpl-") == answer._request_id.removeprefix("req_")


def test_a_stream_has_the_role_first_then_text_then_the_reason_then_the_usage(plain):
    with client(plain) as api:
        chunks = list(
            api.chat.completions.create(
                model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, world!"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 13
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_has_no_usage_unless_asked_for(plain):
    with client(plain) as api:
        chunks = list(api.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_the_async_client_streams_too(plain):
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="none") as api:
            stream = await api.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == "Hello, world!"


def test_sampling_fields_reach_the_engine(plain):
    with client(plain) as api:
        api.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            temperature=0.5,
            top_p=0.9,
            stop=["world"],
            seed=-1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": -100},
            max_completion_tokens=5,
            extra_body={"top_k": 3, "min_p": 0.1},
        )
    sampling = plain.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.5, 0.9, ("world",))
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.logit_bias, sampling.max_tokens, sampling.seed) == ({7: -100.0}, 5, 2**63 - 1)
    assert (sampling.top_k, sampling.min_p) == (3, 0.1)


def test_without_fields_the_api_defaults_hold_and_the_answer_may_fill_the_context(plain):
    with client(plain) as api:
        api.chat.completions.create(model=MODEL, messages=HELLO)
    request = plain.engine.requests[-1]
    assert request.sampling.temperature == 1.0
    assert request.sampling.max_tokens == MAX_MODEL_LEN - len(request.token_ids)


def test_a_stop_text_ends_the_answer_and_is_not_in_it(plain):
    with client(plain) as api:
        answer = api.chat.completions.create(model=MODEL, messages=HELLO, stop=", ")
        short = api.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello", "stop")
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("Hell", "length")


def test_choices_have_seeds_of_their_own_and_the_first_has_the_one_given():
    with world(lambda request: f"seed {request.sampling.seed}") as here, client(here) as api:
        answer = api.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=11)
        again = api.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=11)
        chunks = list(api.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=11, stream=True))
    texts = [choice.message.content for choice in answer.choices]
    assert texts[0] == "seed 11"
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert answer.usage.prompt_tokens == len(here.engine.requests[0].token_ids)
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_log_probabilities_name_tokens_and_bytes():
    with world("é!") as here, client(here) as api:
        answer = api.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
        chunks = list(api.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, stream=True))
    content = answer.choices[0].logprobs.content
    assert [item.token for item in content] == ["é", "!"]
    assert content[0].bytes == list("é".encode())
    assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -1.25]
    streamed = [
        item for chunk in chunks if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content
    ]
    assert [item.token for item in streamed] == ["é", "!"]


def test_log_probabilities_come_with_the_text_that_they_belong_to_and_none_is_lost_with_a_held_text():
    with world("abcdefgEN", step=2) as here, client(here) as api:
        ask: Any = {"model": MODEL, "messages": HELLO, "logprobs": True, "stream": True, "stop": ["ENDE"]}
        chunks = [chunk.choices[0] for chunk in api.chat.completions.create(**ask)]
    seen = [(each.delta.content, each.logprobs and each.logprobs.content) for each in chunks]
    spelled = [(text, "".join(item.token for item in items or ())) for text, items in seen]
    assert spelled == [
        ("", ""),
        ("ab", "ab"),
        ("cd", "cd"),
        ("ef", "ef"),
        ("g", "gE"),
        ("EN", "N"),
        (None, ""),
    ]


def test_tool_calls_are_parsed_whole_and_streamed():
    with world(f"Let me look.\n{CALL}", dialect=TOOLS) as here, client(here) as api:
        ask: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER]}
        answer = api.chat.completions.create(**ask).choices[0]
        chunks = list(api.chat.completions.create(**ask, stream=True))
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "Let me look."
    assert answer.message.tool_calls[0].function.name == "weather"
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"city": "Bern"}
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.type, call.function.name) for call in calls] == [(0, "function", "weather")]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    _, tools, _ = here.letters.seen[-1]
    assert tools[0]["function"]["name"] == "weather"


def test_a_tool_result_goes_back_with_its_call_as_an_object():
    history: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    with world(dialect=TOOLS) as here, client(here) as api:
        api.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER])
    turns, _, _ = here.letters.seen[-1]
    assert turns[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    assert turns[2] == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}


def test_thoughts_are_apart_from_the_answer_and_counted():
    with world("<think>\nHm.\n</think>\n\nYes.", dialect=THINKS, step=1) as here, client(here) as api:
        answer = api.chat.completions.create(model=MODEL, messages=HELLO)
        chunks = list(api.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
        api.chat.completions.create(model=MODEL, messages=HELLO, reasoning_effort="none")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    assert answer.usage.completion_tokens_details.reasoning_tokens >= 3
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert here.letters.seen[-1][2]["enable_thinking"] is False


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_held_to_the_tools_schema_and_read_as_a_call(choice):
    with (
        world('{"name": "weather", "arguments": {"city": "Bern"}}', dialect=THINKS) as here,
        client(here) as api,
    ):
        ask: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice}
        answer = api.chat.completions.create(**ask).choices[0]
        chunks = list(api.chat.completions.create(**ask, stream=True))
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert answer.message.tool_calls[0].function.name == "weather"
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert json.loads(streamed[0].function.arguments) == {"city": "Bern"}
    (held,) = json.loads(here.engine.requests[0].sampling.json_schema)["anyOf"]
    assert held["properties"]["name"] == {"const": "weather"}
    assert held["properties"]["arguments"] == WEATHER["function"]["parameters"]
    assert here.letters.seen[-1][2]["enable_thinking"] is False


def test_a_response_format_holds_the_answer_to_its_schema():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with world('{"a": 1}', dialect=THINKS) as here, client(here) as api:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = api.chat.completions.create(model=MODEL, messages=HELLO, response_format=wanted)
        api.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "json_object"})
    assert answer.choices[0].message.content == '{"a": 1}'
    held = [json.loads(request.sampling.json_schema) for request in here.engine.requests]
    assert held == [schema, {"type": "object"}]
