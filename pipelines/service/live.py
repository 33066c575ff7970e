"""The service at a glance: what its page shows, and shows again a second later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from dflash_engine.stats import EngineStats
from pipelines.cost import Price
from pipelines.service.engine_figures import FRESH_S, EngineFigures

WINDOW_S = 10.0
"""Rates are of the last seconds for which somebody has looked, and of no more than these."""


class _Sample(NamedTuple):
    at_s: float
    stats: EngineStats


class Live:
    """Figures of now, and rates between looks."""

    def __init__(
        self,
        model: str,
        figures: EngineFigures,
        price: Price | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._figures = figures
        self._price = price
        self._clock = clock
        self._samples: deque[_Sample] = deque()

    async def now(self) -> dict[str, Any]:
        """`tokens_per_s` is None at a first look, `cost_usd` where nobody told the price."""
        engines = len(await self._figures.engines())
        stats = await self._figures.total()
        before = self._before(stats)
        return {
            "model": self._model,
            "engines": engines,
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": stats.kv_usage,
            "tokens_per_s": None if before is None else self._tokens_per_s(before, stats),
            "acceptance_length": _acceptance_length(before, stats),
            "generated_tokens": stats.completion_tokens,
            "busy_s": stats.busy_ns / 1e9,
            "cost_usd": None if self._price is None else float(self._price.cost_usd(stats.busy_ns)),
        }

    def _before(self, stats: EngineStats) -> _Sample | None:
        """The oldest look in the window; this one is kept too."""
        now_s = self._clock()
        while self._samples and now_s - self._samples[0].at_s > WINDOW_S:
            self._samples.popleft()
        before = self._samples[0] if self._samples else None
        if not self._samples or now_s - self._samples[-1].at_s >= FRESH_S / 2:
            self._samples.append(_Sample(now_s, stats))
        return before

    def _tokens_per_s(self, before: _Sample, stats: EngineStats) -> float | None:
        elapsed_s = self._clock() - before.at_s
        if elapsed_s < FRESH_S / 2:
            return None
        return (stats.completion_tokens - before.stats.completion_tokens) / elapsed_s


def _acceptance_length(before: _Sample | None, stats: EngineStats) -> float | None:
    """Of the window, or since the start where nothing was drafted in it; None where nothing ever was."""
    if before is not None and (drafts := stats.drafts - before.stats.drafts) > 0:
        return 1 + (stats.accepted_tokens - before.stats.accepted_tokens) / drafts
    return stats.acceptance_length or None
