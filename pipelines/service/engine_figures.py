"""Counters of the engines behind the service, asked for when somebody looks, at most once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields

from dflash_engine.stats import EngineStats

EngineSource = Callable[[], Awaitable[Mapping[str, EngineStats]]]
"""Stats of the engines that there are, each under a name of its own."""
_OF_NOW = frozenset({"waiting", "running", "kv_usage"})
FRESH_S = 1.0


class EngineFigures:
    """What the engines count. Of those that have gone, the last counters are kept for the totals."""

    def __init__(self, source: EngineSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._asking = asyncio.Lock()
        self._engines: Mapping[str, EngineStats] = {}
        self._seen: dict[str, EngineStats] = {}
        self._at_s: float | None = None

    async def engines(self) -> Mapping[str, EngineStats]:
        """Of each engine that answers."""
        async with self._asking:
            if self._at_s is None or self._clock() - self._at_s >= FRESH_S:
                self._engines = await self._source()
                self._seen.update(self._engines)
                self._at_s = self._clock()
            return self._engines

    async def total(self) -> EngineStats:
        """Counters since the service started; running, waiting and KV of the engines that there are now."""
        now = list((await self.engines()).values())
        sums = {
            each.name: sum(
                getattr(stats, each.name) for stats in (now if each.name in _OF_NOW else self._seen.values())
            )
            for each in fields(EngineStats)
        }
        sums["kv_usage"] /= max(1, len(now))
        return EngineStats(**sums)
