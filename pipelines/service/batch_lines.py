"""The lines of a batch's input file, checked before any of them is done.

What is wrong with the file as a batch fails it, with the numbers of the lines. What is wrong inside a
request's body is that request's own error, as if it had been sent alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from pipelines.parse import BOM, is_blank
from pipelines.service.batch import BatchError

MAX_ERRORS = 50
MAX_CUSTOM_ID = 512


@dataclass(frozen=True, slots=True)
class Checked:
    """`num_requests` where there are no errors."""

    num_requests: int
    errors: tuple[BatchError, ...]


def check_lines(
    lines: Iterable[bytes], endpoint: str, max_requests: int, is_model: Callable[[str], bool]
) -> Checked:
    """See that the lines make a batch for `endpoint`; the first errors of those that do not."""
    errors: list[BatchError] = []
    first_lines: dict[str, int] = {}
    total = 0
    for number, raw in numbered(lines):
        total += 1
        if total > max_requests:
            message = f"the file has more than {max_requests:,} requests; divide it into several batches"
            errors.append(BatchError(code="too_many_requests", message=message, line=number))
            break
        error = _line_error(raw, number, endpoint, is_model, first_lines)
        if error is not None:
            errors.append(error)
            if len(errors) == MAX_ERRORS:
                break
    if not total:
        errors.append(BatchError(code="empty_file", message="the input file has no requests"))
    return Checked(total, tuple(errors))


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    for number, raw in enumerate(lines, 1):
        offset = 0 if number == 1 else 1
        if not is_blank(raw, offset):
            yield number, raw.removeprefix(BOM) if number == 1 else raw


def _line_error(
    raw: bytes, number: int, endpoint: str, is_model: Callable[[str], bool], first_lines: dict[str, int]
) -> BatchError | None:
    def wrong(code: str, message: str, param: str | None = None) -> BatchError:
        return BatchError(code=code, message=message, line=number, param=param)

    try:
        values: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return wrong("invalid_json_line", f"the line is not valid JSON: {error}")
    if not isinstance(values, dict):
        return wrong("invalid_json_line", "the line is not a JSON object")
    for name in ("custom_id", "method", "url", "body"):
        if values.get(name) is None:
            return wrong("missing_required_parameter", f"{name} is missing", name)
    custom_id, body = values["custom_id"], values["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        text = f"custom_id is not a text of 1 to {MAX_CUSTOM_ID} characters"
        return wrong("invalid_custom_id", text, "custom_id")
    first = first_lines.setdefault(custom_id, number)
    if first != number:
        return wrong("duplicate_custom_id", f"custom_id {custom_id!r} is in line {first} too", "custom_id")
    if values["method"] != "POST":
        return wrong("invalid_method", f"method {values['method']!r:.60} is not POST", "method")
    if values["url"] != endpoint:
        return wrong("invalid_url", f"url {values['url']!r:.60} is not the endpoint {endpoint}", "url")
    if not isinstance(body, dict):
        return wrong("invalid_body", "body is not a JSON object", "body")
    model = body.get("model")
    if not isinstance(model, str):
        return wrong("missing_required_parameter", "body.model is missing", "body.model")
    if not is_model(model):
        return wrong("model_not_found", f"model {model!r:.200} does not exist here", "body.model")
    return None
