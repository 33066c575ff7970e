"""One line or record of the input becomes one row: a request, or an error with its reason.

Forms: `{"prompt": "…"}`, `{"messages": […]}`, or an OpenAI Batch line. Where a row has both messages and a
prompt, the messages count and the prompt is carried. Every column that is not understood is carried; one
named like an output column is carried as `input_<name>`.

Codes of error rows (`error_type`): invalid_utf8, invalid_json, invalid_row, invalid_prompt, invalid_sampling,
unknown_url, unsupported_parameter, line_too_long, unreadable_input; from the engine context_length_exceeded
and what else `dflash_engine.errors` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from dflash_engine.errors import RequestError
from dflash_engine.request import Message, Request, SamplingParams
from pipelines.openai_line import (
    GRAMMAR_FIELDS,
    SAMPLING_FIELDS,
    TEXT_URL,
    check_envelope,
    completion_prompt,
    sampling_fields,
)
from pipelines.rows import RESERVED, BadRow, InputRow, RowError, type_name

BOM = b"\xef\xbb\xbf"
# Sampling parameters that rows ask for are often the same; checking them takes longer than parsing a row.
MAX_SAMPLINGS = 1024
_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
_WITH_MESSAGES = SAMPLING_FIELDS | {"custom_id", "system", "messages"}
_WITH_PROMPT = _WITH_MESSAGES | {"prompt"}


class RowParser:
    """Makes rows of lines and records; `defaults` hold where a row says nothing of its own."""

    def __init__(self, defaults: SamplingParams) -> None:
        self._defaults = defaults
        self._given = defaults.model_dump(exclude_unset=True)
        self._samplings: dict[bytes, SamplingParams] = {}

    def line(self, raw: bytes, *, file: str, offset: int) -> InputRow | None:
        """The row of one line, None where it is blank.

        `raw` has no line feed; `offset` is where the line starts, and a BOM is only known at 0.
        """
        try:
            values = orjson.loads(raw)
        except orjson.JSONDecodeError:
            if is_blank(raw, offset):
                return None
            try:
                values = _json(_without_bom(raw, offset).removesuffix(b"\r"))
            except BadRow as problem:
                return error_row(file, offset, raw, problem.error)
        return self.values(values, raw=raw, file=file, offset=offset)

    def values(self, values: object, *, raw: bytes, file: str, offset: int) -> InputRow:
        """The row of one JSON value that was read from `raw`."""
        if not isinstance(values, dict):
            reason = RowError("invalid_row", f"the row is {type_name(values)}, not an object")
            return error_row(file, offset, raw, reason)
        row_id = f"{file}:{offset}"
        custom_id: str | None = None
        request: Request | None = None
        error: RowError | None = None
        try:
            custom_id = _custom_id(values.get("custom_id"))
            prompt, sampling = _request_fields(values)
            request = Request(**prompt, sampling=self._sampling(sampling), request_id=row_id)
        except BadRow as problem:
            error = problem.error
        except RequestError as problem:
            error = RowError(problem.code, str(problem))
        return InputRow(
            row_id=row_id,
            offset=offset,
            raw=raw,
            custom_id=custom_id,
            request=request,
            carried=_carried(values),
            error=error,
        )

    def _sampling(self, asked: Mapping[str, Any]) -> SamplingParams:
        if not asked:
            return self._defaults
        # As JSON, where 1, 1.0 and true differ.
        key = orjson.dumps(asked)
        known = self._samplings.get(key)
        if known is None:
            given = self._given
            if GRAMMAR_FIELDS & asked.keys():
                given = {name: value for name, value in given.items() if name not in GRAMMAR_FIELDS}
            known = SamplingParams(**{**given, **asked})
            if len(self._samplings) == MAX_SAMPLINGS:
                self._samplings.clear()
            self._samplings[key] = known
        return known


def is_blank(raw: bytes, offset: int) -> bool:
    """True for a line of white space, which is no row."""
    return not raw.startswith(b"{") and not _without_bom(raw, offset).strip(b" \t\r")


def error_row(file: str, offset: int, raw: bytes, error: RowError) -> InputRow:
    """A row of which nothing but its place is known."""
    return InputRow(row_id=f"{file}:{offset}", offset=offset, raw=raw, error=error)


def _without_bom(raw: bytes, offset: int) -> bytes:
    return raw.removeprefix(BOM) if offset == 0 else raw


def _json(line: bytes) -> Any:
    try:
        return orjson.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow(
            "invalid_utf8", f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start} of the line"
        ) from error
    except orjson.JSONDecodeError as error:
        raise BadRow("invalid_json", f"not JSON: {error}") from error


def _is_batch_line(values: Mapping[str, Any]) -> bool:
    return values.get("messages") is None and values.get("prompt") is None and values.get("body") is not None


def _request_fields(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prompt, as fields of a request, and the sampling values that the row gives. Raises `BadRow`."""
    if _is_batch_line(values):
        body = check_envelope({**values, "body": _unpacked(values["body"], "body")})
        if values["url"] == TEXT_URL:
            return completion_prompt(body.get("prompt")), sampling_fields(body, "prompt")
        return {"messages": _messages(body.get("messages"), None)}, sampling_fields(body, "messages")
    sampling = {name: values[name] for name in SAMPLING_FIELDS & values.keys() if values[name] is not None}
    return {"messages": _conversation(values)}, sampling


def _conversation(values: Mapping[str, Any]) -> tuple[Message, ...]:
    system = values.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRow("invalid_prompt", f"system is {type_name(system)}, not text")
    if values.get("messages") is not None:
        return _messages(values["messages"], system)
    prompt = values.get("prompt")
    if prompt is None:
        raise BadRow(
            "invalid_prompt", "no prompt: a row has messages, prompt, or an OpenAI Batch line's body"
        )
    if not isinstance(prompt, str):
        raise BadRow("invalid_prompt", f"prompt is {type_name(prompt)}, not text")
    return _messages([{"role": "user", "content": prompt}] if prompt else [], system)


def _messages(turns: object, system: str | None) -> tuple[Message, ...]:
    turns = _unpacked(turns, "messages")
    if not isinstance(turns, list):
        raise BadRow("invalid_prompt", f"messages is {type_name(turns)}, not a list")
    if not turns:
        raise BadRow("invalid_prompt", "the prompt is empty")
    messages = tuple([_message(turn, number) for number, turn in enumerate(turns)])
    if system is None:
        return messages
    if messages[0].role == "system":
        raise BadRow("invalid_prompt", "both system and a system message are given")
    return (Message("system", system), *messages)


def _message(turn: object, number: int) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise BadRow("invalid_prompt", f"message {number} is not an object with a role")
    if len(turn) > 2 or "content" not in turn:
        for name in ("tool_calls", "function_call"):
            if turn.get(name):
                raise BadRow("unsupported_parameter", f"message {number}: {name} is not supported")
    return Message(turn["role"], _content(turn.get("content"), number))


def _content(content: object, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(
            "invalid_prompt", f"message {number}: content is {type_name(content)}, not text or text parts"
        )
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRow("invalid_prompt", f"message {number}: only parts of type text are supported")
        texts.append(part["text"])
    return "".join(texts)


def _unpacked(value: object, name: str) -> object:
    """Columns of Parquet files often hold lists and objects as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise BadRow("invalid_prompt", f"{name} is text that is not JSON") from error


def _custom_id(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise BadRow("invalid_row", f"custom_id is {type_name(value)}, not text or a number")


def _carried(values: Mapping[str, Any]) -> dict[str, Any]:
    if _is_batch_line(values):
        known = _ENVELOPE
    else:
        known = _WITH_MESSAGES if values.get("messages") is not None else _WITH_PROMPT
    carried: dict[str, Any] = {}
    for name, value in values.items():
        if name in known:
            continue
        column = name
        while column in RESERVED or (column != name and column in values):
            column = f"input_{column}"
        carried[column] = value
    return carried
