"""An id for every request, in the header that each SDK reads."""

from __future__ import annotations

import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEY = "dflash.request_id"


class RequestIds:
    """Middleware; plain ASGI, so that a stream passes through as it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        made = scope[_KEY] = secrets.token_hex(12)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = f"req_{made}"
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id(http: HttpRequest) -> str:
    """The random part of the id; responses' own ids have it behind a prefix of their kind."""
    made: str = http.scope[_KEY]
    return made
