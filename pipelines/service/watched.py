"""A reply that is made while its client listens, and ends when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipelines.service.replies import expected

Make = Callable[[AsyncExitStack], Awaitable[Response]]


class Watched(Response):
    """Calls `make` and sends what it gives; whatever `make` enters in the stack is left in every case.

    The body of the request must have been read: all that can come from the client then is its going. That
    is noticed while the answer is queued as well as while it streams, whatever the server's ASGI version.
    """

    def __init__(self, make: Make) -> None:
        super().__init__()
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = asyncio.ensure_future(self._reply(scope, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Not only after the client has gone: a server that stops cancels this too.
            gone.cancel()
            was_done = reply.done()
            reply.cancel()
            await asyncio.gather(reply, gone, return_exceptions=True)
        if was_done:
            reply.result()

    async def _reply(self, scope: Scope, send: Send) -> None:
        try:
            async with AsyncExitStack() as stack:
                response = await self._make(stack)
                await response(scope, _never, send)
        except ClientDisconnect:  # noticed by a send that failed
            return
        except Exception as error:  # of any kind: the server would answer it in its own form
            raise expected(error) from error


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError("nothing sets the event")
