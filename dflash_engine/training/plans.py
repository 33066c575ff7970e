"""Which rows and anchors each step trains on: a function of the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_engine.training.packing import Int32s

AHEAD = 3
"""Plans made before they are asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Of one step."""

    rows: NDArray[np.int64]
    """[b]"""
    anchors: Int32s
    """[b, A] columns, rising. Where a row has fewer, columns that no block may begin at fill up."""


class Planner:
    """Rows in a new order every epoch, and as many of their anchors at random as a step takes."""

    def __init__(self, labels: Int32s, rows: int, anchors: int, seed: tuple[int, ...]) -> None:
        """labels [R, S] as in `PackedRows`; rows and anchors of one step."""
        assert anchors <= labels.shape[1]
        self._barred = labels == 0
        self._rows, self._anchors, self._seed = rows, anchors, seed
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.arange(0))

    def plan(self, step: int) -> StepPlan:
        """Steps count from 0."""
        num_rows = len(self._barred)
        places = np.arange(step * self._rows, (step + 1) * self._rows)
        rows = np.array([self._in_epoch(int(place) // num_rows)[place % num_rows] for place in places])
        chance = np.random.default_rng((*self._seed, 1, step)).random(
            (self._rows, self._barred.shape[1]), dtype=np.float32
        )
        chance[self._barred[rows]] = 2.0
        anchors = np.argpartition(chance, self._anchors - 1, axis=1)[:, : self._anchors]
        return StepPlan(rows, np.sort(anchors, axis=1).astype(np.int32))

    def plans(self, first: int, end: int) -> Iterator[StepPlan]:
        """Of the steps from `first` to `end` - 1, made ahead in a thread."""
        with ThreadPoolExecutor(1) as thread:
            waiting = [thread.submit(self.plan, step) for step in range(first, min(first + AHEAD, end))]
            for step in range(first, end):
                if step + AHEAD < end:
                    waiting.append(thread.submit(self.plan, step + AHEAD))
                yield waiting.pop(0).result()

    def _in_epoch(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            rng = np.random.default_rng((*self._seed, 0, epoch))
            self._order = (epoch, rng.permutation(len(self._barred)))
        return self._order[1]


def anchors_of_all(labels: Int32s, rows: int, anchors: int) -> Iterator[tuple[StepPlan, NDArray[np.bool_]]]:
    """Plans that hold every anchor of every row once, and which of their places [b, A] count."""
    pieces = []
    for row, line in enumerate(labels):
        columns = np.flatnonzero(line)
        pieces += [(row, columns[at : at + anchors]) for at in range(0, len(columns), anchors)]
    for begin in range(0, len(pieces), rows):
        group = pieces[begin : begin + rows]
        plan = StepPlan(np.zeros(rows, np.int64), np.zeros((rows, anchors), np.int32))
        counts = np.zeros((rows, anchors), dtype=bool)
        for at, (row, columns) in enumerate(group):
            plan.rows[at] = row
            plan.anchors[at] = columns[-1]
            plan.anchors[at, : len(columns)] = columns
            counts[at, : len(columns)] = True
        yield plan, counts
