"""What is known of one HTTP request once it is over, for metrics and the access log."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.service.request_ids import request_id
from pipelines.service.usage_record import UsageRecord

_KEY = "dflash.observation"
# The tasks that make an answer inherit the context of the request that they make it for.
_CURRENT: ContextVar[Observation | None] = ContextVar(_KEY, default=None)
UNKNOWN_ROUTE = "none"
"""One name for all paths that do not exist, of which clients can ask any number."""
CLIENT_GONE = 499


@dataclass(slots=True)
class Observation:
    """Filled while the request is answered."""

    method: str
    route: str = UNKNOWN_ROUTE
    """The pattern, with names of parameters in place of values."""
    status: int = CLIENT_GONE
    duration_s: float = 0.0
    request_id: str = ""
    owner: str | None = None
    """None where no key was asked for, or none was right."""
    usages: list[UsageRecord] = field(default_factory=list)
    """One for each choice."""


class Observed:
    """Middleware inside `RequestIds`: tells `see` of every request, before the client hears of its end."""

    def __init__(self, app: ASGIApp, see: Callable[[Observation], None]) -> None:
        self._app = app
        self._see = see

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = scope[_KEY] = Observation(scope["method"])
        token = _CURRENT.set(seen)
        began_s = time.monotonic()
        told = False

        def tell() -> None:
            nonlocal told
            if not told:
                told = True
                seen.duration_s = time.monotonic() - began_s
                seen.route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
                seen.request_id = request_id(HttpRequest(scope))
                self._see(seen)

        async def send_seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
            elif not message.get("more_body", False):
                tell()
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        except Exception:
            if seen.status == CLIENT_GONE:
                seen.status = 500
            raise
        finally:
            _CURRENT.reset(token)
            tell()


def observed(http: HttpRequest) -> Observation:
    """That of a request."""
    seen: Observation = http.scope[_KEY]
    return seen


def observe_usage(record: UsageRecord) -> None:
    """Keep what a choice used with the request that is being answered."""
    if (seen := _CURRENT.get()) is not None:
        seen.usages.append(record)
