"""Faults at moments that a seed chooses: processes killed and puts that fail after they succeeded.

A moment is the k-th event of its kind in the whole job, whichever process it happens in, so that a seed
strikes at the same point of the work on a fast machine and on a slow one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pytest
import ray

from dflash_engine.config import EngineConfig
from dflash_engine.fake import FakeEngine
from dflash_engine.request import Request, Result
from pipelines import admission_actor
from pipelines.admission_actor import RemoteAdmission
from pipelines.config import BatchConfig
from pipelines.engines import EngineFactory, open_engine
from pipelines.errors import JobError
from pipelines.job import MANIFEST_KEY
from pipelines.lease_object import LEASE_KEY
from pipelines.storage import LocalStore

Victim = Literal["self", "driver", "admission", "node", "put"]
Event = Literal["row", "put", "written", "read", "manifest"]


@dataclass(frozen=True, slots=True)
class Fault:
    """At the k-th event of a kind, something ends: the process it happens in, another one, or the put."""

    victim: Victim
    event: Event
    at: int


@dataclass(frozen=True, slots=True)
class Chaos:
    """The faults of one job. `folder` is where its processes count events and say who they are."""

    folder: Path
    faults: tuple[Fault, ...]

    def happens(self, event: Event) -> None:
        """Count an event, and strike where its moment has come."""
        number = self._count(event)
        for fault in self.faults:
            if (fault.event, fault.at) == (event, number):
                self._strike(fault)

    def here_is(self, victim: Victim, pid: int) -> None:
        (self.folder / f"{victim}.pid").write_text(str(pid))

    def silence_leases(self) -> None:
        """From now on no lease is renewed."""
        (self.folder / "silent").touch()

    def is_silent(self) -> bool:
        return (self.folder / "silent").exists()

    def _count(self, event: Event) -> int:
        for number in itertools.count(1):
            try:
                (self.folder / f"{event}-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return number
        raise AssertionError

    def _strike(self, fault: Fault) -> None:
        if fault.victim == "put":
            raise JobError(f"the answer to put {fault.at} was lost")
        if fault.victim == "self":
            os.kill(os.getpid(), signal.SIGKILL)
        told = self.folder / f"{fault.victim}.pid"
        try:
            pid = int(told.read_text())
        except FileNotFoundError:
            return  # an earlier fault has struck it
        told.unlink()
        os.kill(pid, signal.SIGKILL)


class ChaosStore(LocalStore):
    """A folder whose parts are written, and whose objects are read, among faults."""

    def __init__(self, root: Path, chaos: Chaos) -> None:
        super().__init__(root)
        self._chaos = chaos

    def open(self, key: str) -> BinaryIO:
        # The driver looks at the input too, and is not meant here.
        if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            self._chaos.happens("read")
        return super().open(key)

    def put(self, key: str, data: bytes) -> None:
        part = key.startswith(("data/", "errors/"))
        if part:
            self._chaos.happens("put")
        super().put(key, data)
        if part:
            self._chaos.happens("written")

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        if key == LEASE_KEY and self._chaos.is_silent():
            raise JobError("the store does not answer")
        return super().put_if_match(key, data, etag)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        done = super().put_if_absent(key, data)
        if key == MANIFEST_KEY:
            self._chaos.happens("manifest")
        return done


class ChaosEngine:
    """An engine that is struck when it has answered a row."""

    def __init__(self, chaos: Chaos, opened: EngineFactory, config: EngineConfig) -> None:
        self._chaos = chaos
        self._engine = opened(config)
        self.fingerprint = self._engine.fingerprint

    async def generate(self, request: Request) -> Result:
        result = await self._engine.generate(request)
        self._chaos.happens("row")
        return result


def chaos_factory(chaos: Chaos, opened: EngineFactory = open_engine) -> EngineFactory:
    return partial(ChaosEngine, chaos, opened)


class PoisonedEngine(FakeEngine):
    """A process that ends at once where a prompt has the word poison in it."""

    async def generate(self, request: Request) -> Result:
        if "poison" in str(request.messages):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(request)


def among_faults(config: BatchConfig, chaos: Chaos, patch: pytest.MonkeyPatch) -> None:
    """Let a job's stores, and its admission, be struck."""
    store = ChaosStore(Path(config.output), chaos)
    patch.setattr("pipelines.batch.open_store", lambda uri, settings: store)
    patch.setattr("pipelines.batch.open_admission", partial(_watched_admission, chaos))
    patch.setattr("pipelines.input_keys.LocalStore", lambda root: ChaosStore(root, chaos))


@contextlib.contextmanager
def _watched_admission(chaos: Chaos, *arguments: Any) -> Iterator[RemoteAdmission]:
    """`open_admission` that lets the actor's process be found."""
    with admission_actor.open_admission(*arguments) as admission:
        handle = admission._handle
        chaos.here_is("admission", ray.get(handle.__ray_call__.remote(lambda self: os.getpid())))
        yield admission
