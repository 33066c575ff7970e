"""What rounds take where nothing was measured beforehand: a straight line through those that ran."""

from __future__ import annotations

import math

KEPT = 0.98
"""Of the weight of earlier rounds at each new one: about the last fifty count."""
MOST_SURPRISE = 4.0
"""A round counts as at most so many times longer than foreseen: some wait for a page or another process."""
SPREAD = 1e-3
"""Below this share of their mean square, sizes differ too little to say what a token costs."""


class ObservedTimes:
    """Seconds of a round by its query tokens. Takes the place of `StepTimes` on a CPU, where drafts and their
    context count with the tokens that are drafted, and the host is part of every round.

    Until rounds of different sizes were seen, each token counts as costing its share of a whole round.
    """

    def __init__(self) -> None:
        self._weight = self._sizes = self._seconds = self._squares = self._products = 0.0
        self._start_s, self._token_s = 0.0, 1.0

    def verify(self, num_tokens: int) -> float:
        return self._start_s + self._token_s * num_tokens

    def draft(self, num_rows: int) -> float:
        return 0.0

    def context(self, num_tokens: int) -> float:
        return 0.0

    def floor(self, num_rows: int) -> float:
        return 0.0

    def observe_round(
        self, num_tokens: int, num_rows: int, num_drafting: int, with_context: bool, seconds: float
    ) -> None:
        """As `StepTimes.observe_round`. Times that cannot be (a clock set back) are ignored."""
        if num_tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
            return
        if self._weight:
            seconds = min(seconds, MOST_SURPRISE * self.verify(num_tokens))
        self._weight = KEPT * self._weight + 1
        self._sizes = KEPT * self._sizes + num_tokens
        self._seconds = KEPT * self._seconds + seconds
        self._squares = KEPT * self._squares + num_tokens * num_tokens
        self._products = KEPT * self._products + num_tokens * seconds
        self._fit()

    def _fit(self) -> None:
        """Least squares, with neither part below zero."""
        size, seconds = self._sizes / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - size * size
        share_s = seconds / size
        if variance <= SPREAD * size * size:
            self._start_s, self._token_s = 0.0, share_s
            return
        slope = (self._products / self._weight - size * seconds) / variance
        self._token_s = min(max(slope, 0.0), share_s)
        self._start_s = seconds - self._token_s * size
