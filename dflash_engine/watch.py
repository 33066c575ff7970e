"""Rank 0's ear: what the other ranks say, and which one ends."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import NamedTuple

from torch import Tensor

from dflash_engine.errors import EngineDead
from dflash_engine.process_group import ProcessGroup

GRACE_S = 10.0
"""For a process to end when it was told to, and for the end of one to be noticed here."""


class Failed(NamedTuple):
    """The last that a worker says: why it ends, in one sentence or as a traceback."""

    reason: str


class Watch:
    """Hears what the workers say, in a thread of its own, and notices which one ends."""

    def __init__(self, pipes: Sequence[Connection], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.reports: SimpleQueue[object] = SimpleQueue()
        """What workers said at the start; None where one has ended."""
        self.failed = threading.Event()
        self.reason = ""
        self.closing = False
        self._ranks = {pipe: rank for rank, pipe in enumerate(pipes, 1)}
        self._processes = processes
        self._group: ProcessGroup | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="dflash-ranks", daemon=True)
        self._thread.start()

    def guard(self, group: ProcessGroup) -> None:
        """The group in which rank 0 waits for the others, to be ended when they are."""
        with self._lock:
            self._group = group
            if self.failed.is_set():
                group.abort()

    def dead(self) -> EngineDead:
        return EngineDead(self.reason)

    def end(self) -> None:
        """Once the workers have ended on purpose."""
        self._thread.join()
        if self._group is not None and not self.failed.is_set():
            self._group.abort()

    def _listen(self) -> None:
        left = dict(self._ranks)
        while left:
            for pipe in wait(list(left)):
                assert isinstance(pipe, Connection)
                rank = left[pipe]
                try:
                    said = pipe.recv()
                except (EOFError, OSError):
                    said = Failed(_status(self._processes[rank - 1]))
                    del left[pipe]
                    pipe.close()
                if not isinstance(said, Failed):
                    self.reports.put(said)
                elif not self.closing and not self.failed.is_set():
                    self._fail(f"rank {rank} of {len(self._ranks) + 1} has ended: {said.reason}")

    def _fail(self, reason: str) -> None:
        with self._lock:
            self.reason = reason
            self.failed.set()
            group = self._group
        self.reports.put(None)
        for process in self._processes:
            process.kill()
        if group is not None:
            group.abort()


class GuardedGroup:
    """A group whose errors are those of the rank that caused them."""

    def __init__(self, group: ProcessGroup, watch: Watch) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._watch = watch

    def all_gather(self, part: Tensor) -> Tensor:
        try:
            return self._group.all_gather(part)
        except RuntimeError as error:
            if self._watch.failed.wait(GRACE_S):
                raise self._watch.dead() from error
            raise


def _status(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    return f"it said nothing and its exit status is {process.returncode}"
