"""Which batch sequences online has kept from going on for too long: the bound that a configuration sets."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter

from dflash_engine.request import Priority
from dflash_engine.residency import Residency
from dflash_engine.sequence import SequenceState

_PRIORITY = attrgetter("priority")


class Starvation:
    """Treats a sequence of batch as online once it has stood still for `limit_s`, until it goes on.

    Those that run are watched one by one, and keep their rank. Of those that wait only the first is, and only
    while none of batch runs: behind others of batch it waits for these, not for online. It is online until it
    has a new token, so that it cannot be sent away before. Steps of batch alone cost nothing.
    """

    def __init__(
        self, residency: Residency, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.due: set[int] = set()
        """Running sequences of batch that are to be served as if online in the step to be planned."""
        self._residency = residency
        self._limit_s = limit_s
        self._clock = clock
        self._none_ran_since_s: float | None = None
        self._promoted: SequenceState | None = None

    def look(self) -> None:
        """To be called before each step is planned."""
        running, waiting = self._residency.running, self._residency.waiting
        if self._promoted is not None:
            self._demote(self._promoted)
        self.due.clear()
        if self._residency.first_class() != Priority.ONLINE:
            self._none_ran_since_s = None
            return
        now_s = self._clock()
        batch = running[bisect_left(running, Priority.BATCH, key=_PRIORITY) :]
        first = bisect_left(waiting, Priority.BATCH, key=_PRIORITY)
        if batch or self._promoted is not None or first == len(waiting):
            self._none_ran_since_s = None
        elif self._none_ran_since_s is None:
            self._none_ran_since_s = now_s
        elif now_s - self._none_ran_since_s >= self._limit_s:
            self._none_ran_since_s = None
            self._promote(waiting[first])
        for sequence in batch:
            if sequence.stood_at != sequence.num_fed:
                sequence.stood_at, sequence.stood_since_s = sequence.num_fed, now_s
            elif now_s - sequence.stood_since_s >= self._limit_s:
                self.due.add(sequence.seq_id)

    def forget(self, sequence: SequenceState) -> None:
        """It has ended."""
        if self._promoted is sequence:
            self._promoted = None

    def _promote(self, sequence: SequenceState) -> None:
        self._residency.reclass(sequence, Priority.ONLINE)
        sequence.promoted_at = len(sequence.output)
        self._promoted = sequence

    def _demote(self, sequence: SequenceState) -> None:
        assert sequence.promoted_at is not None
        if len(sequence.output) > sequence.promoted_at:
            self._promoted = sequence.promoted_at = None
            sequence.stood_at = -1
            self._residency.reclass(sequence, Priority.BATCH)
