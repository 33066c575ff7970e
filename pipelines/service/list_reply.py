"""Lists as OpenAI's clients page through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pipelines.service.errors import invalid
from pipelines.service.object_table import PageAsked
from pipelines.service.replies import json_reply


def page_asked(http: HttpRequest, default: int, most: int) -> PageAsked:
    """What the query says. Raises `ApiError` 400."""
    query = http.query_params
    text, order = query.get("limit", str(default)), query.get("order", "desc")
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise invalid(f"limit: not a number from 1 to {most}", "limit", "invalid_value")
    if order == "asc" or order == "desc":
        return PageAsked(int(text), query.get("after"), ascending=order == "asc")
    raise invalid("order: neither asc nor desc", "order", "invalid_value")


def list_reply(items: list[Mapping[str, Any]], *, has_more: bool) -> Response:
    return json_reply(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": has_more,
        }
    )
