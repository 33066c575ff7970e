"""Lines of OpenAI Batch output files, checked against the types of OpenAI's own client."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import orjson
import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject

from pipelines.openai_line import CHAT_URL, TEXT_URL
from pipelines.openai_output import OpenAIPart, error_line, output_columns, output_line
from pipelines.repairs import parse_repair
from pipelines.rows import RESULT_FIELDS

LOGPROBS = [
    {"token": 7, "logprob": -0.5, "top": [{"token": 7, "logprob": -0.5}, {"token": 9, "logprob": -2.0}]}
]


def answered(**values: Any) -> dict[str, Any]:
    row = {
        "row_id": "in.jsonl:0", "custom_id": "c", "status": "ok", "text": "Hi\u2028there",
        "finish_reason": "stop", "prompt_tokens": 5, "cached_tokens": 4, "completion_tokens": 3,
        "steps": 2, "drafted_tokens": 8, "accepted_tokens": 1, "gpu_seconds": 0.25,
        "cost_usd": Decimal("0.000012345678"), "error_type": None, "error_message": None, "model": "m",
    }  # fmt: skip
    assert list(row) == [field.name for field in RESULT_FIELDS]
    return row | values


def failed(code: str) -> dict[str, Any]:
    nothing = dict.fromkeys(
        ("prompt_tokens", "cached_tokens", "completion_tokens", "steps", "drafted_tokens", "accepted_tokens"),
        0,
    )
    gone = {
        "status": "error",
        "text": None,
        "finish_reason": None,
        "gpu_seconds": 0.0,
        "cost_usd": Decimal(0),
    }
    return answered(**nothing, **gone, error_type=code, error_message="why")


def line(row: dict[str, Any], url: str = CHAT_URL, **options: Any) -> dict[str, Any]:
    return orjson.loads(output_line(row, url=url, created_s=1_700_000_000, **options))


def test_a_chat_is_a_chat_completion_of_the_service():
    found = line(answered(), logprobs=LOGPROBS)
    assert set(found) == {"id", "custom_id", "response", "error", "row_id"}
    assert (found["custom_id"], found["error"]) == ("c", None)
    assert found["id"].startswith("batch_req_")
    response = found["response"]
    assert set(response) == {"status_code", "request_id", "body"}
    assert response["status_code"] == 200
    body = ChatCompletion.model_validate(response["body"], strict=True)
    (choice,) = body.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Hi\u2028there",
        "stop",
    )
    assert (body.model, body.created) == ("m", 1_700_000_000)
    assert (body.usage.total_tokens, body.usage.prompt_tokens_details.cached_tokens) == (8, 4)
    (token,) = choice.logprobs.content
    assert (token.token, token.logprob) == ("token_id:7", -0.5)
    assert [top.token for top in token.top_logprobs] == ["token_id:7", "token_id:9"]


def test_raw_text_is_a_text_completion_of_the_service():
    found = line(answered(), TEXT_URL, logprobs=LOGPROBS)
    body = Completion.model_validate(found["response"]["body"], strict=True)
    (choice,) = body.choices
    assert (choice.text, choice.finish_reason) == ("Hi\u2028there", "stop")
    assert choice.logprobs.top_logprobs == [{"token_id:7": -0.5, "token_id:9": -2.0}]
    assert CompletionUsage.model_validate(found["response"]["body"]["usage"], strict=True).total_tokens == 8


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("invalid_sampling", 400, "invalid_request_error"),
        ("context_length_exceeded", 400, "invalid_request_error"),
        ("engine_crash", 500, "server_error"),
    ],
)
def test_a_request_that_failed_is_a_response_with_its_status(code: str, status: int, kind: str):
    found = line(failed(code))
    assert (found["response"]["status_code"], found["error"]) == (status, None)
    error = ErrorObject.model_validate(found["response"]["body"]["error"], strict=True)
    assert (error.code, error.message, error.type) == (code, "why", kind)


def test_a_line_that_never_was_a_request_has_an_error_and_no_response():
    found = line(failed("invalid_json"))
    assert (found["response"], found["error"]) == (None, {"code": "invalid_json", "message": "why"})


def test_ids_belong_to_the_row_and_not_to_the_attempt():
    first, again, other = (line(answered(row_id=row_id)) for row_id in ("a:0", "a:0", "a:1"))
    assert first == again
    assert {first["id"], first["response"]["request_id"]}.isdisjoint(
        {other["id"], other["response"]["request_id"]}
    )


@pytest.mark.parametrize(
    "row", [answered(), answered(custom_id=None, finish_reason="length"), answered(text="")]
)
@pytest.mark.parametrize("url", [CHAT_URL, TEXT_URL])
def test_the_columns_of_an_answer_can_be_read_back(row: dict[str, Any], url: str):
    found = output_columns(output_line(row, url=url, created_s=1))
    assert found | {"cost_usd": Decimal(str(found["cost_usd"]))} == row


@pytest.mark.parametrize("code", ["invalid_json", "invalid_prompt", "internal_error"])
def test_the_columns_of_a_failure_can_be_read_back(code: str):
    row = failed(code)
    assert output_columns(output_line(row, url=CHAT_URL, created_s=1)) == row | {"model": None}


def test_an_error_line_can_be_repaired():
    record = {"row_id": "in.jsonl:0", "custom_id": "c", "file": "in.jsonl", "offset": 0, "raw": "{"}
    data = error_line(orjson.dumps(record), failed("invalid_json"))
    assert orjson.loads(data)["error"]["code"] == "invalid_json"
    assert parse_repair(data).raw == b"{"


def test_a_part_holds_all_rows_and_rows_done_again_take_their_places():
    part = OpenAIPart(clock=lambda: 5.0)
    rows = [answered(row_id="f:0"), failed("invalid_json") | {"row_id": "f:1"}, answered(row_id="f:2")]
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {"url": [CHAT_URL, None, TEXT_URL]}
    old = part.encode(columns, [{}, {}, {"logprobs": LOGPROBS}])
    assert part.columns(old, ("row_id", "status")) == {
        "row_id": ["f:0", "f:1", "f:2"],
        "status": ["ok", "error", "ok"],
    }
    objects = [orjson.loads(item)["response"] for item in old.splitlines()]
    assert [item and item["body"]["object"] for item in objects] == [
        "chat.completion",
        None,
        "text_completion",
    ]
    again = part.encode({name: [value] for name, value in answered(row_id="f:1", text="now").items()}, [{}])
    merged = part.merge(old, again, [1])
    assert part.columns(merged, ("text",)) == {"text": ["Hi\u2028there", "now", "Hi\u2028there"]}
    assert merged.split(b"\n")[0] == old.split(b"\n")[0]
