"""Answered rows as lines of an OpenAI Batch output file, and failed ones as lines of its error file.

Fields are those that the service writes; beside them stand `row_id`, and in `usage` the counters and the cost
that the service does not know, so that a part can be summed up again. Carried columns have no place there.
Ids are made of the row_id: a row done again has the same ones.

A request that was refused or failed is a response with the status that the service would give; a line that
never became a request has no response, but an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from pipelines.openai_line import CHAT_URL, TEXT_URL
from pipelines.rows import RESULT_FIELDS

NO_REQUEST = frozenset({"invalid_utf8", "invalid_json", "invalid_row", "line_too_long", "unreadable_input"})
OUR_FAULT = frozenset({"internal_error", "engine_crash"})
_EXTRA_USAGE = ("steps", "drafted_tokens", "accepted_tokens", "gpu_seconds", "cost_usd")
_NOTHING = {"prompt_tokens": 0, "completion_tokens": 0, **dict.fromkeys(_EXTRA_USAGE, 0)}

Row = Mapping[str, Any]
"""A value for each of `rows.RESULT_FIELDS`."""


class OpenAIPart:
    """A part whose rows are lines of an OpenAI Batch output file, failed ones included."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def encode(self, columns: Mapping[str, Sequence[Any]], carried: Sequence[Mapping[str, Any]]) -> bytes:
        """Lines of rows. The column `url` says which endpoint a row was for; without it all are chats."""
        created_s = int(self._clock())
        urls = columns.get("url") or [CHAT_URL] * len(carried)
        return b"".join(
            output_line(row, url=url or CHAT_URL, created_s=created_s, logprobs=extra.get("logprobs"))
            for row, url, extra in zip(_rows(columns), urls, carried, strict=True)
        )

    def merge(self, old: bytes, new: bytes, places: Sequence[int]) -> bytes:
        lines = _lines(old)
        for place, line in zip(places, _lines(new), strict=True):
            lines[place] = line
        return b"".join(line + b"\n" for line in lines)

    def columns(self, data: bytes, names: Sequence[str]) -> dict[str, list[Any]]:
        """A value of each row for each of these names."""
        records = [output_columns(line) for line in _lines(data)]
        return {name: [record[name] for record in records] for name in names}


def output_line(
    row: Row, *, url: str, created_s: int, logprobs: Sequence[Mapping[str, Any]] | None = None
) -> bytes:
    """One line, with its line feed. `logprobs` as rows carry them: token, logprob, top."""
    key = blake2b(row["row_id"].encode(), digest_size=16).hexdigest()
    code = row["error_type"]
    error = None
    if code is None:
        body = (_text if url == TEXT_URL else _chat)(row, key, logprobs)
        body |= {
            "created": created_s,
            "model": row["model"],
            "usage": _usage(row),
            "system_fingerprint": None,
        }
        response = _response(200, key, body)
    elif code in NO_REQUEST:
        response, error = None, {"code": code, "message": row["error_message"]}
    else:
        response = _response(500 if code in OUR_FAULT else 400, key, {"error": _error(row)})
    line = {
        "id": f"batch_req_{key}",
        "custom_id": row["custom_id"],
        "response": response,
        "error": error,
        "row_id": row["row_id"],
    }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def error_line(record: bytes, row: Row) -> bytes:
    """The line of a failed row with everything of its error record, so that it can be repaired."""
    line = orjson.loads(output_line(row, url=CHAT_URL, created_s=0))
    return orjson.dumps({**line, **orjson.loads(record)}, option=orjson.OPT_APPEND_NEWLINE)


def output_columns(line: bytes) -> dict[str, Any]:
    """The columns that an output line was made of."""
    found = orjson.loads(line)
    response = found["response"] or {"body": {"error": found["error"]}}
    body = response["body"]
    problem = body.get("error")
    usage = body.get("usage", _NOTHING)
    choice = {} if problem else body["choices"][0]
    return {
        "row_id": found["row_id"],
        "custom_id": found["custom_id"],
        "status": "error" if problem else "ok",
        "text": choice.get("text", choice.get("message", {}).get("content")),
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
        "completion_tokens": usage["completion_tokens"],
        **{name: usage[name] for name in _EXTRA_USAGE},
        "error_type": problem and problem["code"],
        "error_message": problem and problem["message"],
        "model": body.get("model"),
    }


def _lines(data: bytes) -> list[bytes]:
    return [line for line in data.split(b"\n") if line]


def _rows(columns: Mapping[str, Sequence[Any]]) -> Iterator[Row]:
    names = [field.name for field in RESULT_FIELDS]
    for values in zip(*(columns[name] for name in names), strict=True):
        yield dict(zip(names, values, strict=True))


def _response(status_code: int, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status_code, "request_id": f"req_{key}", "body": body}


def _error(row: Row) -> dict[str, Any]:
    kind = "server_error" if row["error_type"] in OUR_FAULT else "invalid_request_error"
    return {"message": row["error_message"], "type": kind, "param": None, "code": row["error_type"]}


def _chat(row: Row, key: str, logprobs: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": row["text"], "refusal": None, "annotations": []}
    listed = None if logprobs is None else {"content": [_token(item) for item in logprobs], "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": listed, "finish_reason": row["finish_reason"]}
    return {"id": f"chatcmpl-{key}", "object": "chat.completion", "choices": [choice]}


def _text(row: Row, key: str, logprobs: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    listed = None
    if logprobs is not None:
        listed = {
            "tokens": [_token_name(item["token"]) for item in logprobs],
            "token_logprobs": [item["logprob"] for item in logprobs],
            "top_logprobs": [
                {_token_name(top["token"]): top["logprob"] for top in item["top"]} for item in logprobs
            ],
            "text_offset": None,
        }
    choice = {"index": 0, "text": row["text"], "logprobs": listed, "finish_reason": row["finish_reason"]}
    return {"id": f"cmpl-{key}", "object": "text_completion", "choices": [choice]}


def _token(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "token": _token_name(item["token"]),
        "logprob": item["logprob"],
        "bytes": None,
        "top_logprobs": [
            {"token": _token_name(top["token"]), "logprob": top["logprob"], "bytes": None}
            for top in item["top"]
        ],
    }


def _token_name(token: int) -> str:
    """Rows know tokens by their ids only; vLLM writes them so where it is asked for ids."""
    return f"token_id:{token}"


def _usage(row: Row) -> dict[str, Any]:
    return {
        "prompt_tokens": row["prompt_tokens"],
        "completion_tokens": row["completion_tokens"],
        "total_tokens": row["prompt_tokens"] + row["completion_tokens"],
        "prompt_tokens_details": {"cached_tokens": row["cached_tokens"], "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
        **{name: row[name] for name in _EXTRA_USAGE},
        "cost_usd": float(row["cost_usd"]),
    }
