"""What the device spends on each round and its pieces, measured on the device."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class RoundTimes(NamedTuple):
    """Nanoseconds of device time. The context of a round is known, and counted, one round later."""

    draft_ns: int
    verify_ns: int
    context_before_ns: int

    @property
    def busy_ns(self) -> int:
        return self.draft_ns + self.verify_ns + self.context_before_ns


class RoundTimer:
    """Four marks in the device's queue for each round: start, drafted, verified, done.

    Rounds follow each other on one queue, so no time is in two of them. On a CPU the marks are the clock.
    """

    def __init__(self, device: torch.device, num_rounds: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[list[torch.cuda.Event]] = [
            [torch.cuda.Event(enable_timing=True) for _ in range(4)] if self._on_gpu else []
            for _ in range(num_rounds)
        ]
        self._clock = [[0] * 4 for _ in range(num_rounds)]
        self._before: int | None = None

    def start(self, index: int) -> None:
        self._mark(index, 0)

    def drafted(self, index: int) -> None:
        self._mark(index, 1)

    def verified(self, index: int) -> None:
        self._mark(index, 2)

    def done(self, index: int) -> None:
        self._mark(index, 3)

    def wait(self, index: int) -> RoundTimes:
        """Waits until the round's tokens are chosen; to be asked for each round once, in their order."""
        before, self._before = self._before, index
        if self._on_gpu:
            self._marks[index][2].synchronize()
        context_ns = self._between(before, 2, 3) if before is not None else 0
        return RoundTimes(self._between(index, 0, 1), self._between(index, 1, 2), context_ns)

    def _mark(self, index: int, place: int) -> None:
        if self._on_gpu:
            self._marks[index][place].record()
        else:
            self._clock[index][place] = time.perf_counter_ns()

    def _between(self, index: int, first: int, last: int) -> int:
        if not self._on_gpu:
            return self._clock[index][last] - self._clock[index][first]
        marks = self._marks[index]
        return int(marks[first].elapsed_time(marks[last]) * 1e6)
