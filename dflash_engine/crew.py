"""Rank 0's side of a tensor-parallel engine: starts the other ranks, and tells them each round.

    rank 0 (the engine's process)                    ranks 1, 2, ... (`worker.py`, a process each)
    scheduler, tokenizer, answers
    read models, build caches      <- numbers, errors ->   read models, build caches
    launch a round                 --- what is new  --->   queue the same round
    device: sums of all ranks      <==== NCCL ====>        device: sums of all ranks

A worker says nothing after the start but why it ends. Where rank 0 ends, its pipes do, and the workers too.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

import torch

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError, EngineDead
from dflash_engine.fingerprint import device_kind
from dflash_engine.gpu_runner import Round
from dflash_engine.ops import Group
from dflash_engine.plan import RowPlan, StepPlan
from dflash_engine.process_group import ProcessGroup, open_store
from dflash_engine.shard import Rank, Shard
from dflash_engine.watch import GRACE_S, GuardedGroup, Watch

Report = TypeVar("Report", int, str)
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; from dflash_engine.worker import main; main(int(sys.argv[1]))"
)
"""A new interpreter, which imports the engine and not the program around it."""


class Orders(NamedTuple):
    """The first that a worker is told."""

    config: EngineConfig
    shard: Shard
    port: int
    """Of the group's store."""


class Crew:
    """The other ranks of an engine. They end with it, at the latest when nobody refers to it any more."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Starts them; they find and read their models by themselves. Raises `ConfigError`."""
        size = config.tensor_parallel_size
        store = open_store()
        workers = [_start(Orders(config, Shard(rank, size), store.port)) for rank in range(1, size)]
        self._pipes = [pipe for pipe, _ in workers]
        processes = [process for _, process in workers]
        self._watch = Watch(self._pipes, processes)
        self._end = weakref.finalize(self, _close, self._watch, self._pipes, processes)
        with self.starting():
            self._check_devices(device)
            group = ProcessGroup(store, 0, size, device)
            self._watch.guard(group)
        self._shard = Shard(0, size)
        self._group: Group = GuardedGroup(group, self._watch)

    @property
    def rank(self) -> Rank:
        """That of rank 0."""
        return Rank(self._shard, self._group, self.agree, self)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """What happens here is the start of the engine: where it fails, all ranks end. Raises `ConfigError`
        where a worker has failed."""
        try:
            yield
        except (EngineDead, RuntimeError) as error:
            failed = self._watch.failed.is_set()
            self.close()
            if not failed:
                raise
            raise ConfigError(self._watch.reason) from error
        except BaseException:
            self.close()
            raise

    def agree(self, number: int) -> int:
        """The least of all ranks' numbers. Raises `EngineDead` where a worker has failed."""
        least = min([number, *self._gather(int)])
        for pipe in self._pipes:
            self._send(pipe, pickle.dumps(least))
        return least

    def tell(self, told: object) -> None:
        """Says a round (`Round`, or `StepPlan` for one with the host in it) to all workers without waiting
        for them. Raises `EngineDead` where one has ended."""
        data = pickle.dumps(light(told), protocol=pickle.HIGHEST_PROTOCOL)
        for pipe in self._pipes:
            self._send(pipe, data)

    def check(self) -> None:
        """Raises `EngineDead` with the reason where a worker has ended."""
        if self._watch.failed.is_set():
            raise self._watch.dead()

    def close(self) -> None:
        """Ends all workers and waits for them."""
        self._end()

    def _check_devices(self, device: torch.device) -> None:
        kind = device_kind(device)
        for other in self._gather(str):
            if other != kind:
                raise ConfigError(
                    f"tensor_parallel_size needs GPUs of one kind; there are {kind} and {other}"
                )

    def _gather(self, kind: type[Report]) -> list[Report]:
        """A report from each worker."""
        said: list[Report] = []
        for _ in self._pipes:
            report = self._watch.reports.get()
            if report is None:
                raise self._watch.dead()
            assert isinstance(report, kind), report
            said.append(report)
        return said

    def _send(self, pipe: Connection, data: bytes) -> None:
        try:
            pipe.send_bytes(data)
        except OSError as error:
            if self._watch.failed.wait(GRACE_S):
                raise self._watch.dead() from error
            raise


def _start(orders: Orders) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
    with suppress(OSError):  # it has ended already, which will be noticed
        ours.send(orders)
    return ours, process


def _close(
    watch: Watch,
    pipes: Sequence[Connection],
    processes: Sequence[subprocess.Popen[bytes]],
) -> None:
    watch.closing = True
    for pipe in pipes:
        with suppress(OSError):  # it has ended already
            pipe.send(None)
    for process in processes:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    watch.end()


def light(told: object) -> object:
    """What workers need of a `StepPlan` or `Round`: the tokens of a request, which may be many, only where a
    choice depends on them."""
    if isinstance(told, StepPlan):
        return StepPlan(tuple(map(_light_row, told.rows)), told.write_context, told.on_host)
    assert isinstance(told, Round)
    if told.changes is None or not told.changes.placed:
        return told
    placed = [_light_row(row)._replace(tokens=(), block_table=()) for row in told.changes.placed]
    return told._replace(changes=told.changes._replace(placed=placed))


def _light_row(row: RowPlan) -> RowPlan:
    return row if row.sampling.penalised else row._replace(prompt=(), output=())
