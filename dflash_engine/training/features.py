"""Where context features are kept: on the device, in a mapped file, or nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_engine.errors import ConfigError
from dflash_engine.training.packing import PackedRows
from dflash_engine.training.target import Target

Progress = Callable[[int, int], None]
"""Rows done, of how many."""


class FeatureStore(Protocol):
    """Features of some packed rows."""

    def fetch(self, rows: NDArray[np.int64], out: Tensor) -> None:
        """Those of the rows into out [b, S, F] on the device."""
        ...


class DeviceFeatures:
    """All of them on the device, computed when made."""

    def __init__(
        self, target: Target, rows: PackedRows, taps: Sequence[int], like: Tensor, progress: Progress
    ) -> None:
        """`like` [..., F] has the dtype, device and width. Raises `ConfigError` where they do not fit."""
        shape = (*rows.tokens.shape, like.shape[-1])
        try:
            self._all = torch.zeros(shape, dtype=like.dtype, device=like.device)
        except torch.OutOfMemoryError as error:
            size = np.prod(shape) * like.element_size() / 2**30
            raise ConfigError(
                f"the features take {size:.1f} GiB, more than {like.device} has: more data.windows, or "
                "features.place disk"
            ) from error
        _compute(target, rows, taps, self._all, progress)

    def fetch(self, rows: NDArray[np.int64], out: Tensor) -> None:
        index = torch.from_numpy(rows).to(self._all.device, non_blocking=True)
        torch.index_select(self._all, 0, index, out=out)


class DiskFeatures:
    """All of them in one mapped file, which is computed once for the same rows and target."""

    def __init__(
        self,
        folder: Path,
        name: str,
        target: Callable[[], Target],
        rows: PackedRows,
        taps: Sequence[int],
        like: Tensor,
        progress: Progress,
    ) -> None:
        """`name` tells the rows from others; the target is only asked for where the file is not there."""
        shape = (*rows.tokens.shape, like.shape[-1])
        path, done = folder / f"{name}.features", folder / f"{name}.json"
        size = int(np.prod(shape)) * like.element_size()
        described = {"shape": list(shape), "dtype": str(like.dtype), "layers": list(taps)}
        if not (done.is_file() and json.loads(done.read_text()) == described and path.stat().st_size == size):
            done.unlink(missing_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(size)
            mapped = torch.from_file(str(path), shared=True, size=int(np.prod(shape)), dtype=like.dtype)
            _compute(target(), rows, taps, mapped.view(shape), progress, like)
            done.write_text(json.dumps(described))
        self._all = torch.from_file(str(path), shared=True, size=int(np.prod(shape)), dtype=like.dtype).view(
            shape
        )

    def fetch(self, rows: NDArray[np.int64], out: Tensor) -> None:
        out.copy_(self._all[torch.from_numpy(rows)])


class FreshFeatures:
    """Computed again for every step."""

    def __init__(self, target: Target, rows: PackedRows, taps: Sequence[int]) -> None:
        self._target, self._rows, self._taps = target, rows, taps

    def fetch(self, rows: NDArray[np.int64], out: Tensor) -> None:
        compute(self._target, self._rows.arrays_of(rows), self._taps, out)


def compute(target: Target, rows: PackedRows, taps: Sequence[int], out: Tensor) -> None:
    """Features of all rows into out [R, S, F] on the target's device."""
    _compute(target, rows, taps, out, lambda done, of: None)


def _compute(
    target: Target,
    rows: PackedRows,
    taps: Sequence[int],
    out: Tensor,
    progress: Progress,
    like: Tensor | None = None,
) -> None:
    """By way of a buffer like `like` where `out` lies elsewhere than the target."""
    step = target.group_rows
    for begin in range(0, rows.num_rows, step):
        group = rows.arrays_of(np.arange(begin, min(begin + step, rows.num_rows)))
        place = out[begin : begin + step]
        if like is None:
            target.features(group, taps, place)
        else:
            buffer = torch.zeros(place.shape, dtype=like.dtype, device=like.device)
            target.features(group, taps, buffer)
            place.copy_(buffer)
        progress(min(begin + step, rows.num_rows), rows.num_rows)
