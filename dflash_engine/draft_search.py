"""The best way to draft in a round: which rows, and how many tokens of each are verified.

Rows are ordered by how easy their text is to draft. For all of them, and for as many as smaller draft passes
hold, the likeliest (row, position) pairs are taken, and the rate of committed tokens is evaluated wherever a
pass becomes dearer: up to there, what fills a bucket is free.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_engine.acceptance import Acceptance, Floats
from dflash_engine.step_times import StepTimes

SMALLER_DRAFTS = 2
"""Draft buckets tried below the one that holds all rows: drafting for the easiest rows only."""
STEPS_BEYOND = 32
"""Sizes tried where a round is larger than every measured bucket."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decoding row of the round."""

    request_id: int
    most: int
    """Drafted tokens that it could verify; 0 where it may not draft."""
    missing_context: int = 0
    """Known tokens whose draft context was not written; while there are any, `most` is 0."""


_REQUEST_ID = attrgetter("request_id")


class Option(NamedTuple):
    """A way to draft in a round."""

    num_draft: tuple[int, ...]
    gain: float
    """Drafted tokens expected to be accepted."""
    seconds: float
    rate: float
    """Committed tokens per second."""


class Load(NamedTuple):
    """What a round holds besides drafts, and what plain decoding makes of it."""

    num_rows: int
    num_tokens: int
    """Query tokens without drafted ones."""
    shift_s: float
    """To be added to the round's time, so that prompts count with their mean share instead of this one."""
    plain_s: float

    @property
    def plain_rate(self) -> float:
        return self.num_rows / self.plain_s


class DraftSearch:
    """Looks for the option with the most committed tokens per second."""

    def __init__(self, times: StepTimes, acceptance: Acceptance) -> None:
        self._times = times
        self._acceptance = acceptance

    def best(self, rows: Sequence[Candidate], most: Sequence[int], load: Load) -> Option:
        """The best of all ways to draft, at least one token; row i verifies at most most[i].

        Chances fall from token to token of a row, so the best set of a given size is the likeliest
        tokens; sizes that fill a bucket of the target are tried, each with draft passes of several sizes.
        """
        depth = max(most)
        able = None if all(most) else [i for i, limit in enumerate(most) if limit]
        chosen = rows if able is None else [rows[i] for i in able]
        shifts = self._acceptance.shifts(list(map(_REQUEST_ID, chosen)))
        order = (-shifts).argsort(kind="stable")
        places = order if able is None else np.array(able)[order]
        chances = self._acceptance.chances_of(shifts[order], depth)
        limits = None
        if min(most) < depth:
            limits = np.array(most)[places]
            chances[np.arange(depth)[:, None] >= limits] = 0
        best: tuple[float, float, float] | None = None
        for width in self._widths(len(chosen)):
            pairs = np.sort(chances[:, :width], axis=None)[::-1] if len(chosen) > 1 else chances[:, 0]
            num_pairs = width * depth if limits is None else int(limits[:width].sum())
            sizes = self._sizes(load.num_tokens, num_pairs)
            gains = _sums_of_first(pairs, sizes)
            seconds = self._seconds(load, sizes, width)
            rates = (load.num_rows + gains) / seconds
            at = int(rates.argmax())
            if best is None or rates[at] > best[0]:
                best = (float(rates[at]), float(gains[at]), float(seconds[at]))
                size = int(sizes[at])
                taken, least = chances[:, :width], pairs[size - 1]
        assert best is not None
        rate, gain, total_s = best
        num_draft = np.zeros(load.num_rows, dtype=np.int64)
        num_draft[places[: taken.shape[1]]] = _counts(taken, least, size)
        return Option(tuple(num_draft.tolist()), gain, total_s, rate)

    def _widths(self, num_rows: int) -> list[int]:
        """Numbers of rows to draft for: all, or as many as a smaller draft pass holds."""
        buckets = self._times.kinds["draft"].sizes
        end = bisect_left(buckets, num_rows)
        return [num_rows, *buckets[max(end - SMALLER_DRAFTS, 0) : end]]

    def _sizes(self, num_tokens: int, most: int) -> NDArray[np.int64]:
        """Numbers of drafted tokens up to `most` that fill a bucket, and `most` itself, rising."""
        edges = self._times.token_edges
        first, last = bisect_right(edges, num_tokens), bisect_left(edges, num_tokens + most)
        tokens = edges[first:last]
        beyond = num_tokens + most - edges[-1]
        if beyond > 1:
            step = -(-min(beyond, most) // STEPS_BEYOND)
            tokens += range(max(edges[-1], num_tokens) + step, num_tokens + most, step)
        tokens.append(num_tokens + most)
        return np.array(tokens) - num_tokens

    def _seconds(self, load: Load, sizes: NDArray[np.int64], width: int) -> Floats:
        kinds, tokens = self._times.kinds, sizes + load.num_tokens
        passes = kinds["verify"].seconds_of(tokens) + kinds["context"].seconds_of(tokens)
        passes += kinds["draft"].seconds_of(np.minimum(sizes, width))
        return np.maximum(passes, self._times.floor(load.num_rows)) + load.shift_s


def _sums_of_first(values: NDArray[np.float32], sizes: NDArray[np.int64]) -> Floats:
    """values[:size].sum() for each of the rising sizes."""
    starts = np.zeros_like(sizes)
    starts[1:] = sizes[:-1]
    return np.add.reduceat(values[: sizes[-1]], starts, dtype=np.float64).cumsum()


def _counts(chances: NDArray[np.float32], least: np.float32, size: int) -> NDArray[np.int64]:
    """How many of each column's falling chances are among the best `size`, the worst of which is `least`."""
    if chances.shape[1] == 1:
        return np.array([size])
    counts: NDArray[np.int64] = (chances > least).sum(axis=0)
    surplus = size - int(counts.sum())
    if surplus and least > 0:
        counts[(chances == least).any(axis=0).nonzero()[0][:surplus]] += 1
    return counts
