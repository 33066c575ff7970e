"""From the bytes of a request to a checked value, and from what is wrong with it to one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request as HttpRequest

from pipelines.service.errors import ApiError, invalid


class Body(BaseModel):
    """Base of everything that clients send. Types are strict; unknown fields are kept, to be named."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)


BodyT = TypeVar("BodyT", bound=Body)


async def read_body(http: HttpRequest, limit_bytes: int) -> bytes:
    """The whole body. Raises `ApiError` 413 as soon as it is over the limit."""
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in http.stream():
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
    return b"".join(parts)


def parse_body(raw: bytes, kind: type[BodyT], *, ignore_unknown: bool = False) -> BodyT:
    """Raises `ApiError` 400 that names the place."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid("the body is not a JSON object", code="invalid_json")
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _first_problem(error) from error
    if not ignore_unknown:
        for place in unknown_fields(body):
            raise invalid(f"{place}: unknown field", param=place, code="unknown_parameter")
    return body


def unknown_fields(value: object, place: str = "") -> Iterator[str]:
    """Places of fields that no model knows, as `messages[0].colour`."""
    if isinstance(value, Body):
        dot = f"{place}." if place else ""
        yield from (f"{dot}{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name), f"{dot}{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, f"{place}[{index}]")


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = _place(problem["loc"])
    if problem["type"] == "missing":
        return invalid(f"{place}: field required", param=place, code="missing_required_parameter")
    reason = problem["msg"].removeprefix("Value error, ")
    return invalid(f"{place}: {reason}" if place else reason, param=place or None, code="invalid_value")


def _place(loc: Iterable[int | str]) -> str:
    """pydantic's location without its names of a union's members, which no client knows."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS and not part[0].isupper():
            place += f".{part}" if place else part
    return place


_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "none"})


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than the limit of {limit_bytes} bytes", code="request_too_large"
    )


def compact(values: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that were not given, or given as null, which both APIs take for the same."""
    return {name: value for name, value in values.items() if value is not None}
