"""How much of a round batch may have while online rows are in it: what hardly lengthens theirs."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

ROUNDING = 1e-9
"""Sums of the same times in another order may differ by so much of them."""


class RoundTimes(Protocol):
    """Seconds of a round's parts, rising with their size: `StepTimes`, or `ObservedTimes`."""

    def verify(self, num_tokens: int) -> float:
        """A target pass, by its query tokens."""
        ...

    def draft(self, num_rows: int) -> float:
        """A draft pass, by the rows that draft."""
        ...

    def context(self, num_tokens: int) -> float:
        """Writing the draft's context behind a target pass, by the pass's query tokens."""
        ...

    def floor(self, num_rows: int) -> float:
        """The host's part, beside which the device works."""
        ...

    def observe_round(
        self, num_tokens: int, num_rows: int, num_drafting: int, with_context: bool, seconds: float
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class RoundSize:
    """Rows of a round, those of them that draft, and their query tokens with drafted ones."""

    num_tokens: int
    num_rows: int
    num_drafting: int


class BatchShare:
    """Finds the largest round that takes at most `slowdown` times as long as its online rows alone.

    What fills up a measured size is free. Drafts of batch rows have to fit into the draft pass that online
    rows have anyway. Where a round is longer than foreseen, as with long contexts, `times` learn it.
    """

    def __init__(self, times: RoundTimes, slowdown: float) -> None:
        assert slowdown >= 1, slowdown
        self._times = times
        self._slowdown = slowdown

    @property
    def rounds_between(self) -> float:
        """Rounds of online rows for each round of batch rows that cannot share one with them: together they
        then take no more than `slowdown` times as long either. Infinite where batch may cost nothing."""
        return math.ceil(1 / (self._slowdown - 1)) if self._slowdown > 1 else math.inf

    def largest(self, online: RoundSize, most: RoundSize, *, with_context: bool) -> RoundSize:
        """The whole round with batch, nowhere above `most` nor below `online`."""
        times = self._times
        draft_s = times.draft(online.num_drafting)

        def passes_s(num_tokens: int) -> float:
            context_s = times.context(num_tokens) if with_context else 0.0
            return times.verify(num_tokens) + context_s

        alone_s = max(passes_s(online.num_tokens) + draft_s, times.floor(online.num_rows))
        limit_s = self._slowdown * alone_s * (1 + ROUNDING)
        return RoundSize(
            _largest(passes_s, limit_s - draft_s, online.num_tokens, most.num_tokens),
            _largest(times.floor, limit_s, online.num_rows, most.num_rows),
            _largest(times.draft, draft_s, online.num_drafting, most.num_drafting),
        )


class _Seconds(Protocol):
    def __call__(self, size: int, /) -> float: ...


def _largest(seconds: _Seconds, limit_s: float, least: int, most: int) -> int:
    """The largest size from `least` to `most` that keeps the limit; `least` in any case."""
    return least + bisect_right(range(least + 1, most + 1), limit_s, key=seconds)
