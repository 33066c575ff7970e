"""The processes of a run: one a GPU, each with its part of the rows, all with the same weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dflash_engine.config import EngineConfig
from dflash_engine.devices import select_device
from dflash_engine.errors import ConfigError
from dflash_engine.training.packing import PackedRows

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among them."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def find(cls, device: str) -> Ranks:
        """From torch.distributed where it is initialised; else alone. Raises `ConfigError`."""
        if not dist.is_initialized():
            return cls(0, 1, select_device(EngineConfig(device=device), 0))
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        on_gpu = device != "cpu" and torch.cuda.is_available()
        chosen = select_device(EngineConfig(device=f"cuda:{local}" if on_gpu else "cpu"), 0)
        return cls(dist.get_rank(), dist.get_world_size(), chosen)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, rows: int) -> int:
        """Rows of a step that are this rank's. Raises `ConfigError`."""
        if rows % self.size:
            raise ConfigError(f"batch.rows {rows} cannot be shared evenly by {self.size} GPUs")
        return rows // self.size

    def part_of(self, rows: PackedRows, seed: int) -> PackedRows:
        """As many of the rows for each rank, in a random order."""
        order = np.random.default_rng((seed, 2)).permutation(rows.num_rows)
        return rows.part(order[self.rank :: self.size][: rows.num_rows // self.size])

    def first_alone(self, work: Callable[[], T]) -> T:
        """Rank 0 does it before the others, who then find what it left on disk."""
        if self.leads:
            done = work()
            self.wait()
            return done
        self.wait()
        return work()

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def agreed(self, number: float) -> float:
        """Rank 0's number, on all ranks."""
        if self.size == 1:
            return number
        told = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.broadcast(told, 0)
        return float(told)


@contextmanager
def launched(device: str) -> Iterator[None]:
    """Joins the other processes that torchrun started, if it did."""
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
