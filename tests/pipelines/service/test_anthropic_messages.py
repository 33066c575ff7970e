"""Messages, asked with Anthropic's own client over a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from tests.pipelines.service.scripted import MODEL, THINKS, TOOLS, world

HELLO: Any = [{"role": "user", "content": "Say hello"}]
ASK: Any = {"model": MODEL, "max_tokens": 100, "messages": HELLO}
WEATHER: Any = {"name": "weather", "description": "Now", "input_schema": {"type": "object"}}
FORCED = '{"name": "weather", "arguments": {"city": "Bern"}}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def client(here, **settings):
    return anthropic.Anthropic(base_url=here.url, api_key="none", max_retries=0, **settings)


@pytest.fixture(scope="module")
def plain():
    with world(cached_tokens=4) as here:
        yield here


def test_a_message_is_answered_and_its_kinds_of_input_add_up_to_the_prompt(plain):
    with client(plain) as api:
        answer = api.messages.create(**ASK)
    assert [block.text for block in answer.content] == ["Hello, world!"]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    prompt = len("()<user>Say hello<assistant>")
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (prompt - 4, 4)
    assert (usage.cache_creation_input_tokens, usage.output_tokens) == (0, 13)
    assert answer.id.removeprefix("msg_") == answer._request_id.removeprefix("req_")


def test_the_events_of_a_stream_come_in_their_order(plain):
    with client(plain) as api:
        events = list(api.messages.create(**ASK, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0].message.usage.output_tokens == 0
    assert events[0].message.usage.cache_read_input_tokens == 4
    assert events[0].message.usage.input_tokens == events[-2].usage.input_tokens
    assert events[0].message.content == []
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens == 13
    assert events[-2].usage.cache_read_input_tokens == 4


def test_the_client_puts_a_stream_together_to_the_same_message(plain):
    with client(plain) as api:
        with api.messages.stream(**ASK) as stream:
            assert "".join(stream.text_stream) == "Hello, world!"
            final = stream.get_final_message()
        whole = api.messages.create(**ASK)
    assert final.content[0].text == whole.content[0].text
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens


def test_the_async_client_streams_too(plain):
    async def ask() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=plain.url, api_key="none") as api,
            api.messages.stream(**ASK) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask()) == "Hello, world!"


def test_on_the_wire_each_event_is_named_and_a_ping_follows_the_start(plain):
    answer = plain.http.post("/v1/messages", json={**ASK, "stream": True})
    events = answer.text.strip().split("\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [event.split("\n")[0] for event in events[:2]] == ["event: message_start", "event: ping"]
    assert "[DONE]" not in answer.text


def test_a_stop_sequence_is_named_and_a_full_answer_says_why_it_ended(plain):
    with client(plain) as api:
        stopped = api.messages.create(**ASK, stop_sequences=["xyz", ", w"])
        full = api.messages.create(**{**ASK, "max_tokens": 4})
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "Hello",
        "stop_sequence",
        ", w",
    )
    assert (full.content[0].text, full.stop_reason) == ("Hell", "max_tokens")


def test_of_stop_sequences_that_begin_together_the_one_that_was_whole_first_is_named(plain):
    with client(plain) as api, api.messages.stream(**ASK, stop_sequences=[", w", ",", "o, x"]) as stream:
        assert stream.get_final_message().stop_sequence == ","


@pytest.mark.parametrize(
    "system", ["Be kind.", [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]]
)
def test_system_may_be_text_or_blocks(plain, system):
    with client(plain) as api:
        api.messages.create(**ASK, system=system)
    assert plain.letters.seen[-1][0][0] == {"role": "system", "content": "Be kind."}


def test_tool_use_is_parsed_whole_and_streamed():
    with world(f"I look.\n{CALL}", dialect=TOOLS) as here, client(here) as api:
        whole = api.messages.create(**ASK, tools=[WEATHER])
        with api.messages.stream(**ASK, tools=[WEATHER]) as stream:
            streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert answer.stop_reason == "tool_use"
        text, call = answer.content
        assert (text.type, text.text) == ("text", "I look.")
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Bern"})
        assert call.id.startswith("toolu_")


def test_one_call_at_a_time_where_the_client_asks_for_it():
    with world(CALL + CALL, dialect=TOOLS) as here, client(here) as api:
        both = api.messages.create(**ASK, tools=[WEATHER])
        one = api.messages.create(
            **ASK, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
    assert (len(both.content), len(one.content)) == (2, 1)


def test_thoughts_are_a_block_with_a_signature_whole_and_streamed():
    with world("<think>\nHm.\n</think>\n\nYes.", dialect=THINKS, step=1) as here, client(here) as api:
        ask = {**ASK, "max_tokens": 1100, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        whole = api.messages.create(**ask)
        with api.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        api.messages.create(**ASK)
    for answer in (whole, streamed):
        thought, text = answer.content
        assert (thought.type, thought.thinking) == ("thinking", "Hm.")
        assert (text.type, text.text) == ("text", "Yes.")
    assert whole.content[0].signature == streamed.content[0].signature != ""
    asked = [options["enable_thinking"] for _, _, options in here.letters.seen]
    assert asked == [True, True, False]


def test_tokens_are_counted_as_a_message_counts_them(plain):
    with client(plain) as api:
        counted = api.messages.count_tokens(model=MODEL, messages=HELLO, system="Be kind.")
        answer = api.messages.create(**ASK, system="Be kind.")
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_models_are_listed_in_either_form(plain):
    with client(plain) as api:
        listed = api.models.list()
    assert [(model.id, model.type) for model in listed.data] == [(MODEL, "model"), ("claude-local", "model")]


def test_a_failure_in_mid_stream_is_an_error_event():
    with (
        world(error=RuntimeError("secret"), error_at=2) as here,
        client(here) as api,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        list(api.messages.create(**ASK, stream=True))
    body: Any = caught.value.body
    assert body["error"]["type"] == "api_error"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call_is_read_as_a_call(choice):
    with (
        world('{"name": "weather", "arguments": {"city": "Bern"}}', dialect=TOOLS) as here,
        client(here) as api,
    ):
        whole = api.messages.create(**ASK, tools=[WEATHER], tool_choice=choice)
        with api.messages.stream(**ASK, tools=[WEATHER], tool_choice=choice) as stream:
            streamed = stream.get_final_message()
    for answer in (whole, streamed):
        (call,) = answer.content
        assert (call.name, call.input, answer.stop_reason) == ("weather", {"city": "Bern"}, "tool_use")
    assert '"const":"weather"' in here.engine.requests[0].sampling.json_schema.replace(" ", "")


def test_an_output_format_holds_the_answer_to_its_schema():
    wanted: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    with world("{}", dialect=THINKS) as here, client(here) as api:
        assert api.messages.create(**ASK, output_config=wanted).content[0].text == "{}"
    assert here.engine.requests[0].sampling.json_schema is not None
