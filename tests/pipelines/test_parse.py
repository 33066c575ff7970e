"""One line in, one row out: every accepted form, and every reason for an error row."""

from __future__ import annotations

import orjson
import pytest

from dflash_engine.request import Message, SamplingParams
from pipelines.parse import RowParser
from pipelines.rows import InputRow

DEFAULTS = SamplingParams(max_tokens=8, temperature=0.5)


def row(line: bytes | str | dict, offset: int = 5) -> InputRow:
    raw = orjson.dumps(line) if isinstance(line, dict) else line.encode() if isinstance(line, str) else line
    parsed = RowParser(DEFAULTS).line(raw, file="f.jsonl", offset=offset)
    assert parsed is not None
    assert (parsed.row_id, parsed.offset, parsed.raw) == (f"f.jsonl:{offset}", offset, raw)
    return parsed


def batch_line(body: object, **fields) -> dict:
    return {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body, **fields}


IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{}]}
USER = [{"role": "user", "content": "hi"}]
HI = (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ({"prompt": "hi"}, HI),
        ({"prompt": "hi", "messages": None}, HI),
        ({"messages": USER}, HI),
        ({"messages": orjson.dumps(USER).decode()}, HI),
        ({"system": "s", "prompt": "hi"}, (Message("system", "s"), *HI)),
        ({"system": "s", "messages": USER}, (Message("system", "s"), *HI)),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in "hi"]}]}, HI),
        ({"messages": [{"role": "user", "content": "hi", "name": "x", "tool_calls": None}]}, HI),
        (batch_line({"messages": USER, "model": "gpt", "stream": True, "n": 1}), HI),
        ('{"prompt": "a\u2028b\u0085c"}', (Message("user", "a\u2028b\u0085c"),)),
        (b'{"prompt": "hi"}\r', HI),
        (b'  {"prompt": "hi"}\t', HI),
    ],
)  # fmt: skip
def test_accepted_conversations(line: bytes | str | dict, messages: tuple[Message, ...]):
    parsed = row(line)
    assert parsed.error is None
    assert parsed.request.messages == messages
    assert parsed.request.sampling == DEFAULTS


def test_a_bom_is_stripped_at_the_start_of_a_file_only():
    line = b'\xef\xbb\xbf{"prompt": "hi"}'
    assert row(line, offset=0).request.messages == HI
    assert row(line, offset=9).error.code == "invalid_json"


@pytest.mark.parametrize("line", [b"", b"\r", b" \t ", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r"])
def test_blank_lines_are_no_rows(line: bytes):
    assert RowParser(DEFAULTS).line(line, file="f", offset=0) is None


@pytest.mark.parametrize(("given", "custom_id"), [("a", "a"), (7, "7"), (1.5, "1.5"), ("", ""), (None, None)])
def test_a_custom_id_is_text_or_a_number(given: object, custom_id: str | None):
    assert row({"prompt": "hi", "custom_id": given}).custom_id == custom_id


def test_sampling_of_a_row_goes_over_the_defaults_and_null_means_default():
    sampling = row({"prompt": "hi", "top_k": 3, "temperature": None, "stop": "x"}).request.sampling
    assert (sampling.top_k, sampling.temperature, sampling.stop, sampling.max_tokens) == (3, 0.5, ("x",), 8)


def test_the_body_of_a_batch_line_is_mapped():
    body = {
        "messages": USER, "max_completion_tokens": 4, "max_tokens": 5, "stop": ["x", "y"], "seed": 3,
        "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2, "top_p": 0.5, "user": "u",
    }  # fmt: skip
    sampling = row(batch_line(body)).request.sampling
    assert sampling == SamplingParams(
        max_tokens=4, stop=("x", "y"), seed=3, logit_bias={5: 1.0}, logprobs=2, top_p=0.5, temperature=0.5
    )


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("raw", "raw", None), (["raw"], "raw", None), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2))],
)
def test_prompts_of_v1_completions(prompt: object, text: str | None, token_ids: tuple[int, ...] | None):
    request = row(batch_line({"prompt": prompt}, url="/v1/completions")).request
    assert (request.text, request.token_ids) == (text, token_ids)


def test_other_columns_are_carried_and_names_of_the_output_get_a_prefix():
    parsed = row(
        {"prompt": "hi", "custom_id": "c", "top_k": 1, "id": 3, "text": "t", "model": None, "x": {"y": [1]}}
    )
    assert parsed.carried == {"id": 3, "input_text": "t", "input_model": None, "x": {"y": [1]}}
    both = row({"prompt": "hi", "text": "t", "input_text": "u"})
    assert both.carried == {"input_input_text": "t", "input_text": "u"}


def test_with_messages_a_prompt_is_carried():
    parsed = row({"messages": USER, "prompt": "raw"})
    assert (parsed.request.messages, parsed.carried) == (HI, {"prompt": "raw"})


def test_a_batch_line_carries_what_is_not_its_envelope():
    assert row(batch_line({"messages": USER}, shop=4)).carried == {"shop": 4}


@pytest.mark.parametrize(
    ("line", "code", "reason"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}]}, "invalid_prompt", "only parts of type text"),
        ({"messages": [CALL]}, "unsupported_parameter", "tool_calls is not supported"),
        (b"{", "invalid_json", "not JSON: "),
        (b'{"prompt": NaN}', "invalid_json", "not JSON: "),
        (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json", "not JSON: "),
        (b'{"prompt": "\xff"}', "invalid_utf8", "not UTF-8: byte 0xff at position 12 of the line"),
        (b'{"prompt": "\xc3', "invalid_utf8", "not UTF-8: byte 0xc3"),
        (b"[1]", "invalid_row", "the row is a list, not an object"),
        (b'"text"', "invalid_row", "the row is text, not an object"),
        (b"null", "invalid_row", "the row is null, not an object"),
        ({}, "invalid_prompt", "no prompt"),
        ({"custom_id": "x", "other": 1}, "invalid_prompt", "no prompt"),
        ({"prompt": 3}, "invalid_prompt", "prompt is a number, not text"),
        ({"prompt": ["a"]}, "invalid_prompt", "prompt is a list, not text"),
        ({"prompt": ""}, "invalid_prompt", "the prompt is empty"),
        ({"prompt": "a", "system": 3}, "invalid_prompt", "system is a number, not text"),
        ({"messages": []}, "invalid_prompt", "the prompt is empty"),
        ({"messages": "hello"}, "invalid_prompt", "messages is text that is not JSON"),
        ({"messages": {"role": "user"}}, "invalid_prompt", "messages is an object, not a list"),
        ({"messages": ["a"]}, "invalid_prompt", "message 0 is not an object with a role"),
        ({"messages": [{"content": "a"}]}, "invalid_prompt", "message 0 is not an object with a role"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "invalid_prompt", "role 'bot' is not one of"),
        ({"messages": [{"role": "user", "content": 3}]}, "invalid_prompt", "content is a number, not text"),
        ({"messages": [{"role": "user"}]}, "invalid_prompt", "content is null, not text or text parts"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "invalid_prompt", "both system"),
        ({"prompt": "a", "custom_id": True}, "invalid_row", "custom_id is a truth value"),
        ({"prompt": "a", "custom_id": ["x"]}, "invalid_row", "custom_id is a list"),
        ({"prompt": "a", "temperature": -1}, "invalid_sampling", "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "invalid_sampling", "temperature"),
        ({"prompt": "a", "top_p": 1.5}, "invalid_sampling", "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_sampling", "max_tokens"),
        ({"prompt": "a", "max_tokens": 2.5}, "invalid_sampling", "max_tokens"),
        ({"prompt": "a", "seed": True}, "invalid_sampling", "seed"),
        (batch_line({"messages": USER}, url="/v1/embeddings"), "unknown_url", "url '/v1/embeddings' is not"),
        (batch_line({"messages": USER}, url=None), "unknown_url", "url None is not"),
        (batch_line({"messages": USER}, method="GET"), "invalid_row", "method 'GET' is not POST"),
        (batch_line([1]), "invalid_row", "body is a list, not an object"),
        (batch_line({}), "invalid_prompt", "messages is null, not a list"),
        (batch_line({"messages": USER, "n": 2}), "unsupported_parameter", "n = 2 is not supported"),
        (batch_line({"messages": USER, "tools": [{}]}), "unsupported_parameter", "tools"),
        (batch_line({"messages": USER, "max_tokens": "x"}), "invalid_sampling", "max_tokens"),
        (batch_line({"prompt": ["a", "b"]}, url="/v1/completions"), "invalid_prompt", "is not one text"),
        (batch_line({"prompt": [True]}, url="/v1/completions"), "invalid_prompt", "prompt is not one text"),
    ],
)  # fmt: skip
def test_reasons_for_an_error_row(line: bytes | dict, code: str, reason: str):
    parsed = row(line)
    assert parsed.request is None
    assert parsed.error.code == code
    assert reason in parsed.error.message


def test_an_error_row_keeps_its_custom_id_and_what_it_carries():
    parsed = row({"prompt": "a", "temperature": -1, "custom_id": 4, "shop": "x"})
    assert (parsed.custom_id, parsed.carried) == ("4", {"shop": "x"})


def test_rows_that_ask_for_the_same_share_their_parameters_and_no_others():
    parser = RowParser(DEFAULTS)

    def asked(text: str) -> InputRow:
        return parser.line(b'{"prompt": "a", ' + text.encode() + b"}", file="f", offset=0)

    one, again = asked('"top_k": 1'), asked('"top_k": 1')
    assert one.request.sampling is again.request.sampling
    assert [asked(f'"top_k": {value}').error is None for value in ("1", "1.0", "true", '"1"')] == [
        True,
        False,
        False,
        False,
    ]
    assert asked('"temperature": 1').request.sampling != asked('"temperature": 0').request.sampling
    for seed in range(3000):
        assert asked(f'"seed": {seed}').request.sampling.seed == seed


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"response_format": FORMAT}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": None, "regex": "a+"}, {"regex": "a+"}),
        ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
    ],
)
def test_the_response_format_of_a_batch_line_is_a_grammar(fields: dict, asked: dict):
    for url in ("/v1/chat/completions", "/v1/completions"):
        prompt = {"messages": USER} if "chat" in url else {"prompt": "hi"}
        sampling = row(batch_line({**prompt, **fields}, url=url)).request.sampling
        assert sampling == SamplingParams(max_tokens=8, temperature=0.5, **asked)


@pytest.mark.parametrize("given", [SCHEMA, orjson.dumps(SCHEMA).decode()])
def test_a_plain_row_names_its_schema_as_an_object_or_as_text(given: object):
    parsed = row({"prompt": "hi", "json_schema": given, "shop": 4})
    assert (
        parsed.request.sampling.json_schema
        == '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    )
    assert parsed.carried == {"shop": 4}


def test_the_grammar_of_a_row_takes_the_place_of_the_jobs():
    parser = RowParser(SamplingParams(json_schema=SCHEMA, top_k=3))

    def asked(**fields) -> SamplingParams:
        raw = orjson.dumps({"prompt": "a", **fields})
        return parser.line(raw, file="f", offset=0).request.sampling

    assert asked() == asked(top_k=3) == SamplingParams(json_schema=SCHEMA, top_k=3)
    assert asked(regex="a") == SamplingParams(regex="a", top_k=3)
    assert asked(json_schema={}) == SamplingParams(json_schema={}, top_k=3)
    text = batch_line({"messages": USER, "response_format": {"type": "text"}})
    assert parser.line(orjson.dumps(text), file="f", offset=0).request.sampling == SamplingParams(top_k=3)


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "unsupported_parameter", "response_format = {'type': 'xml'}"),
        ({"response_format": "json"}, "unsupported_parameter", "response_format = 'json' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "invalid_sampling", "schema is not an object"),
        ({"response_format": FORMAT, "regex": "a"}, "invalid_sampling", "response_format excludes"),
        ({"json_schema": SCHEMA, "regex": "a"}, "invalid_sampling", "exclude each other"),
        ({"json_schema": "{"}, "invalid_sampling", "json_schema: "),
    ],
)  # fmt: skip
def test_reasons_why_a_batch_lines_grammar_is_refused(fields: dict, code: str, reason: str):
    parsed = row(batch_line({"messages": USER, **fields}))
    assert parsed.error.code == code
    assert reason in parsed.error.message
