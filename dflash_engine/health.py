"""Whether an engine goes on: asked from any thread, also while the engine's own is stuck."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineHealth:
    alive: bool
    """False where nothing submitted will ever be answered: the engine has failed, or was closed."""
    stalled_s: float = 0.0
    """Since the last round ended, or work came after a rest; 0 without work. How long a round may take
    depends on model and device, so what is too long is for the caller to say."""


class Heartbeat:
    """When the engine's thread last went on. One thread beats; any may read, without a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None

    def beat(self) -> None:
        """There is work, and what came before this is done."""
        self._since_s = self._clock()

    def rest(self) -> None:
        """There is nothing to do."""
        self._since_s = None

    def stalled_s(self) -> float:
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s
