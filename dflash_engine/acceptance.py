"""How likely drafted tokens are accepted: by position, for all requests and for each one.

A drafted token i counts only if those before it were accepted. The chance of that step is modelled as

    P(i accepted | 1 .. i-1 accepted, request r) = sigmoid(level[i] + shift[r])

Both are found by Fisher scoring on each round's outcomes: a step is the sum of (outcome - chance) over the
evidence, the sum of chance * (1 - chance) of what was seen, older outcomes counting less. For level that is a
count of accepted and seen with pseudo-counts; shift has a normal prior of mean 0, its variance learnt, so a
request starts from what all have shown and moves away as fast as its own outcomes are surprising. A plain
count for each position would overrate deep ones in a mixture, because only easy texts get that far.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

FIRST_CHANCE = 0.8
LATER_CHANCE = 0.75
"""Before anything was seen: about what published drafts reach on text that suits them, so that any draft is
tried. Trying in vain costs a few rounds, not trying would cost the speed-up for ever."""
PRIOR_OUTCOMES = 10.0
"""Outcomes that those chances count for: a handful of rounds outweighs them."""
HALF_LIFE = 500.0
"""Outcomes of a position after which older ones count half. The chance is known to two points then; a new
kind of text is followed within one round of a full batch, or about 200 rounds of a single request."""
FIRST_SPREAD = 1.0
LEAST_SPREAD, MOST_SPREAD = 0.15, 4.0
"""Variance of the shifts, at first and its bounds. At 1, chances of 0.46 and 0.86 stand where 0.7 is the
middle. It is learnt, because believing in differences that are not there wastes about 4 % of a round's
tokens on the wrong rows, and not believing in those that are there wastes more."""
SPREAD_ROWS = 200.0
"""Rows that count as much for the spread as all that was seen before."""
SHIFT_HALF_LIFE = 60.0
"""Outcomes of one request: about 20 rounds, a paragraph or a code block."""
UNSEEN_KEPT = 1 - 1 / 128
"""Of a shift's distance from 0, and of all evidence, in a round that verified nothing. A request given up as
hard is so tried again, about once in a hundred rounds."""
FOLLOW = 1 / 8
"""Of the way to the position before it, that a position moves in a round which did not reach it, as long as
it has no evidence; with n times the prior's evidence, 1/n**2 of that."""
UNREACHED_KEPT = 1 - 1 / 512
"""Of a position's evidence in such a round: what was true long ago gives way to what is seen before it."""
MOST_STEP = 1.0
MOST_LEVEL = 5.0
"""Bounds of one step and of a level: far out, one outcome says little and a free step would overshoot."""

FEW = 64
"""Requests up to which numpy's running product is the faster way; for 512 it takes twice as long."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Acceptance:
    """Estimates for drafts of up to `most` tokens. Holds two floats for each request until `forget`."""

    def __init__(self, most: int) -> None:
        assert most >= 1, most
        chance = np.full(most, LATER_CHANCE)
        chance[0] = FIRST_CHANCE
        self.most = most
        self._level: Floats = np.log(chance / (1 - chance))
        self._least_evidence: Floats = PRIOR_OUTCOMES * chance * (1 - chance)
        self._evidence = self._least_evidence.copy()
        self._shift: dict[int, float] = {}
        self._shift_evidence: dict[int, float] = {}
        self._spread = FIRST_SPREAD
        self._positions: Ints = np.arange(most)[:, None]

    def observe(self, request_id: int, num_verified: int, num_accepted: int) -> None:
        """One request's part of a round: see `observe_round`."""
        self.observe_round((request_id,), (num_verified,), (num_accepted,))

    def observe_round(
        self, request_ids: Sequence[int], num_verified: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """A round's outcomes: of num_verified drafted tokens the first num_accepted were the target's.

        Requests that could draft but verified nothing are named with 0. Each request once.
        """
        verified, accepted = np.array(num_verified), np.array(num_accepted)
        depth = int(verified.max(initial=0))
        assert (accepted <= verified).all() and depth <= self.most, (num_verified, num_accepted)
        if depth == 0:
            self._evidence = np.maximum(self._evidence * UNSEEN_KEPT, self._least_evidence)
            return
        position = self._positions[:depth]
        seen = position < np.minimum(accepted + 1, verified)
        hits = (position < accepted).astype(np.float64)
        shift = self.shifts(request_ids)
        self._move_level(seen, hits, shift)
        self._move_shifts(request_ids, seen, hits, shift)

    def chances(self, request_id: int, most: int) -> tuple[float, ...]:
        """P(the first i drafted tokens are all accepted) for i = 1 .. most."""
        column = self.chances_of(self.shifts((request_id,)), most)[:, 0]
        return tuple(column.tolist())

    def chances_of(self, shifts: Floats, most: int) -> NDArray[np.float32]:
        """`chances` of requests with these shifts, [most, requests]: falling from row to row."""
        # In single precision, which is several times as fast to raise and to sort.
        step = np.exp(-self._level[:most, None].astype(np.float32) - shifts.astype(np.float32))
        step += 1
        np.reciprocal(step, out=step)
        if step.shape[1] <= FEW:
            np.multiply.accumulate(step, axis=0, out=step)
            return step
        for i in range(1, most):
            step[i] *= step[i - 1]
        return step

    def shifts(self, request_ids: Sequence[int]) -> Floats:
        """How much easier than the average each request's text is to draft, in logits."""
        return np.array(list(map(self._shift.get, request_ids, repeat(0.0))))

    def forget(self, request_id: int) -> None:
        """The request has ended. Known or not; its last outcomes are to be observed before."""
        self._shift.pop(request_id, None)
        self._shift_evidence.pop(request_id, None)

    def _move_level(self, seen: NDArray[np.bool_], hits: Floats, shift: Floats) -> None:
        depth = len(seen)
        surprise, information = _score(self._level[:depth, None] + shift, seen, hits, axis=1)
        count = seen.sum(axis=1)
        kept = np.maximum(self._evidence[:depth] * 0.5 ** (count / HALF_LIFE), self._least_evidence[:depth])
        evidence = kept + information
        self._evidence[:depth] = evidence
        self._level[:depth] += np.clip(surprise / evidence, -MOST_STEP, MOST_STEP)
        np.clip(self._level, -MOST_LEVEL, MOST_LEVEL, out=self._level)
        # An estimate that nothing can correct any more follows the one nearest to it.
        reached = max(1, int((count > 0).sum()))
        least, evidence = self._least_evidence[reached:], self._evidence[reached:]
        trust = FOLLOW * (least / evidence) ** 2
        self._level[reached:] += trust * (self._level[reached - 1 : -1] - self._level[reached:])
        self._evidence[reached:] = np.maximum(evidence * UNREACHED_KEPT, least)

    def _move_shifts(
        self, request_ids: Sequence[int], seen: NDArray[np.bool_], hits: Floats, shift: Floats
    ) -> None:
        # With the levels just moved, so that what all requests share is not taken for each one's own.
        surprise, information = _score(self._level[: len(seen), None] + shift, seen, hits, axis=0)
        known = self._shift_evidence
        before = np.array(list(map(known.get, request_ids, repeat(0.0))))
        count = seen.sum(axis=0)
        kept = np.where(count > 0, 0.5 ** (count / SHIFT_HALF_LIFE), UNSEEN_KEPT)
        evidence = before * kept + information
        prior = 1 / self._spread
        # The prior's pull was in balance with the outcomes that now count less.
        step = (surprise - (1 - kept) * prior * shift) / (prior + evidence)
        moved = shift + np.clip(step, -MOST_STEP, MOST_STEP)
        self._shift.update(zip(request_ids, moved.tolist(), strict=True))
        known.update(zip(request_ids, evidence.tolist(), strict=True))
        # One step of expectation-maximisation: the mean square of the shifts, uncertainty included.
        spread = float((moved * moved + 1 / (prior + evidence)).mean())
        weight = len(request_ids) / (len(request_ids) + SPREAD_ROWS)
        self._spread += weight * (min(max(spread, LEAST_SPREAD), MOST_SPREAD) - self._spread)


def _score(logits: Floats, seen: NDArray[np.bool_], hits: Floats, axis: int) -> tuple[Floats, Floats]:
    chance = _sigmoid(logits)
    surprise: Floats = ((hits - chance) * seen).sum(axis=axis)
    information: Floats = (chance * (1 - chance) * seen).sum(axis=axis)
    return surprise, information


def _sigmoid(logits: Floats) -> Floats:
    chance: Floats = 1 / (1 + np.exp(-logits))
    return chance
