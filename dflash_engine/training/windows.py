"""Which rows have their features at hand, and the steps that are made with them.

Where the features of all rows fit there is one window. Else the rows are cut into several, whose features
are computed again whenever their turn comes, and each turn lasts for many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_engine.errors import ConfigError
from dflash_engine.training.config import TrainConfig
from dflash_engine.training.features import (
    DeviceFeatures,
    DiskFeatures,
    FeatureStore,
    FreshFeatures,
    Progress,
)
from dflash_engine.training.packing import PackedRows
from dflash_engine.training.plans import Planner, StepPlan
from dflash_engine.training.ranks import Ranks
from dflash_engine.training.step import DeviceRows, TrainStep
from dflash_engine.training.target import Target

TURNS = 2
"""Of each window, unless `data.window_steps` says how long they last."""


class Turn(NamedTuple):
    """Steps from `first` to `end` - 1, with one window's rows."""

    number: int
    first: int
    end: int


class Windows:
    """The rows of one rank."""

    def __init__(
        self,
        config: TrainConfig,
        rows: PackedRows,
        count: int,
        target: Callable[[], Target],
        step: TrainStep,
        ranks: Ranks,
        progress: Progress,
    ) -> None:
        """`target` is only asked for where features have to be computed."""
        self._config, self._target, self._step, self._ranks = config, target, step, ranks
        self._parts = [rows.part(part) for part in np.array_split(np.arange(rows.num_rows), count)]
        self._progress = progress
        self._window = -1
        self._store: FeatureStore | None = None

    @property
    def count(self) -> int:
        return len(self._parts)

    def turn(self, step: int, steps: int) -> Turn:
        """The one that a step belongs to."""
        length = self._config.data.window_steps or math.ceil(steps / (TURNS * self.count))
        if self.count == 1:
            length = steps
        number = step // length
        return Turn(number, number * length, min((number + 1) * length, steps))

    def enter(self, turn: Turn) -> Planner:
        """Has the turn's features at hand; plans count from its first step."""
        window = turn.number % self.count
        if window != self._window:
            # The features before are given back first: two windows do not fit.
            self._store = None
            self._store = self._open(window)
            self._window = window
            self._step.use(DeviceRows.of(self._parts[window], self._step.features.device))
        batch = self._step.features.shape[0]
        seed = (self._config.run.seed, turn.number, self._ranks.rank)
        return Planner(self._parts[window].labels, batch, self._config.batch.anchors, seed)

    def fetch(self, plan: StepPlan) -> None:
        assert self._store is not None
        self._store.fetch(plan.rows, self._step.features)

    def first_row(self) -> tuple[PackedRows, Tensor]:
        """Of the window at hand, and its features [S, F]."""
        assert self._store is not None
        out = torch.zeros_like(self._step.features[:1])
        self._store.fetch(np.zeros(1, np.int64), out)
        return self._parts[self._window], out[0]

    def _open(self, window: int) -> FeatureStore:
        rows, taps, like = self._parts[window], self._step.config.target_layer_ids, self._step.features
        features = self._config.features
        if features.place == "recompute":
            return FreshFeatures(self._target(), rows, taps)
        if features.place == "disk":
            folder = Path(features.folder or Path(self._config.output) / "features")
            name = f"{self._config.digest}-{self._ranks.rank}-of-{self._ranks.size}-{window}"
            return DiskFeatures(folder, name, self._target, rows, taps, like, self._progress)
        return DeviceFeatures(self._target(), rows, taps, like, self._progress)


def window_count(config: TrainConfig, rows: PackedRows, like: Tensor) -> int:
    """As few as fit the device's free memory. Raises `ConfigError` where not even a few rows would."""
    if config.data.windows is not None:
        return min(config.data.windows, rows.num_rows)
    if config.features.place in ("disk", "recompute") or like.device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(like.device)
    room = free - int(config.features.reserve_gib * 2**30)
    each = rows.row_tokens * like.shape[-1] * like.element_size()
    if room < each * like.shape[0]:
        raise ConfigError(
            f"features.reserve_gib {config.features.reserve_gib:g} leaves no room for features in "
            f"{free / 2**30:.0f} GiB that are free: lower it, or features.place: disk"
        )
    return math.ceil(rows.num_rows * each / room)
