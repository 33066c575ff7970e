"""Who may be in an engine at the same time: many together, or one alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Gate:
    """Lets callers in together, or one alone; who waits to be alone goes before those who come later."""

    def __init__(self) -> None:
        self._together = 0
        self._alone = 0
        """Those who are alone or wait for it."""
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """While nobody is alone."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._alone)
            self._together += 1
        try:
            yield
        finally:
            async with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """While nobody else is in."""
        self._alone += 1
        try:
            async with self._turn:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._together)
                yield
        finally:
            async with self._changed:
                self._alone -= 1
                self._changed.notify_all()
