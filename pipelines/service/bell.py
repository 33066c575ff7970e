"""Tells all who listen that something has changed."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ring:
    """The next ring. Listen first and look then: what changes while you look has rung when you wait."""

    _event: asyncio.Event

    async def wait(self, timeout_s: float) -> None:
        """Returns once it has rung, or after the time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)


class Bell:
    """Of one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def listen(self) -> Ring:
        return Ring(self._next)

    def ring(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
