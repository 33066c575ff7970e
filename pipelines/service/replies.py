"""Responses: JSON, event streams, and errors in the form of the API."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.responses import Response, StreamingResponse

from pipelines.service import sse
from pipelines.service.errors import ApiError, Form, as_api_error

logger = logging.getLogger(__name__)


def json_reply(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_reply(error: ApiError, form: Form, request_id: str) -> Response:
    body = orjson.dumps(error.body(form, f"req_{request_id}"))
    return Response(body, error.status, error.headers, media_type="application/json")


def stream_reply(events: AsyncIterator[bytes], form: Form, request_id: str) -> Response:
    return StreamingResponse(
        _with_error(events, form, request_id), media_type="text/event-stream", headers=sse.HEADERS
    )


def expected(error: Exception) -> ApiError:
    """The refusal that an error means; one that nobody expected is logged, and told as 500."""
    known = as_api_error(error)
    if known is None:
        logger.error("a request failed", exc_info=error)
        return ApiError(500, "something went wrong inside the service", code="internal_error")
    return known


async def _with_error(
    events: AsyncIterator[bytes], form: Form, request_id: str
) -> AsyncGenerator[bytes, None]:
    """The status is out already, so what goes wrong is the last event."""
    try:
        async for event in events:
            yield event
    except Exception as error:
        body = expected(error).body(form, f"req_{request_id}")
        yield sse.data(body) if form == "openai" else sse.event(body)
