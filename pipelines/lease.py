"""One driver at a time for an output: a lease object with an owner, an epoch and a time limit.

The owner renews it by compare and swap. No clocks of two machines are compared: a driver elsewhere watches
the object, and takes over when it has not changed for the lease's whole duration. The owner counts from
before its last renewal was sent, so it knows that the lease is lost before anybody else may take it. On
one machine there is less to wait for: its processes share a clock, and it is known which of them live.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TextIO

from pipelines.errors import JobError, JobRefused
from pipelines.lease_object import LEASE_KEY, Found, LeaseRecord, read_lease, swap_lease
from pipelines.processes import seconds_since_boot, this_process
from pipelines.storage import Store

# Two renewals may fail before the third would come too late.
RENEWALS_A_DURATION = 3
# A renewal that failed is tried again this often a duration; as often a driver that waits looks.
TRIES_A_DURATION = 20

logger = logging.getLogger(__name__)


class LeaseLost(JobError):
    """Another driver works on the output, or this one could not renew its lease in time."""


class LeaseHeld(JobRefused):
    """Another driver holds the lease and lives."""


class Lease:
    """A lease that is held, renewed by a thread of its own until it is released; a context manager."""

    def __init__(self, store: Store, record: LeaseRecord, etag: str, taken_s: float) -> None:
        self._store = store
        self._record = record
        self._etag = etag
        self._renewed_s = taken_s
        self._lost: LeaseLost | None = None
        self._callbacks: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, name="lease", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self._record.epoch

    def check(self) -> None:
        """Raises `LeaseLost` where nothing may be committed any more."""
        if self._lost is None and seconds_since_boot() - self._renewed_s >= self._record.duration_s:
            self._lose(f"it could not be renewed for {self._record.duration_s:g} s")
        if self._lost is not None:
            raise self._lost

    def when_lost(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called with the reason, on the lease's thread, when the lease is lost."""
        with self._lock:
            self._callbacks.append(callback)
            lost = self._lost
        if lost is not None:
            callback(str(lost))

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the next driver in at once."""
        self._closing.set()
        self._thread.join()
        if self._lost is not None:
            return
        try:
            self._store.put_if_match(LEASE_KEY, replace(self._record, released=True).as_bytes(), self._etag)
        except JobError as problem:
            logger.warning("the lease was not given back, it runs out by itself: %s", problem)

    def _renew_for_ever(self) -> None:
        duration_s = self._record.duration_s
        wait_s = duration_s / RENEWALS_A_DURATION
        while not self._closing.wait(wait_s):
            wait_s = duration_s / (RENEWALS_A_DURATION if self._renew() else TRIES_A_DURATION)
            try:
                self.check()
            except LeaseLost:
                return

    def _renew(self) -> bool:
        started_s = seconds_since_boot()
        record = self._record.renewed(started_s)
        try:
            found = swap_lease(self._store, record, self._etag)
        except JobError as error:
            logger.warning("the lease was not renewed: %s", error)
            return False
        if found is None or found[0].owner != record.owner:
            self._lose("another driver has taken it over")
            return False
        self._record, self._etag = found
        if found[0] != record:
            return False
        self._renewed_s = started_s
        return True

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._lost = LeaseLost(
                f"the lease on output {self._store.uri} is lost: {reason}; what is written stays, and the "
                "same command goes on once no other driver is at work"
            )
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(str(self._lost))


def take_lease(store: Store, duration_s: float, progress: TextIO) -> Lease:
    """The lease of an output, waiting for one whose owner may be dead to run out.

    Raises `LeaseHeld` where another driver holds it and lives, and `JobRefused` where it cannot be written.
    """
    wanted = LeaseRecord(
        owner=uuid.uuid4().hex,
        epoch=1,
        duration_s=duration_s,
        host=socket.gethostname(),
        process=this_process(),
    )
    try:
        etag: str | None = None
        while True:
            started_s = seconds_since_boot()
            found = swap_lease(store, wanted.renewed(started_s), etag)
            if found is not None and found[0].owner == wanted.owner:
                return Lease(store, *found, started_s)
            etag = None
            if found is not None:
                current, etag = _free(store, *found, progress)
                wanted = replace(wanted, epoch=current.epoch + 1)
    except LeaseHeld:
        raise
    except JobError as error:
        raise JobRefused(f"output {store.uri} cannot be written: {error}") from error


def _free(store: Store, record: LeaseRecord, etag: str, progress: TextIO) -> Found:
    """The lease once its owner has given it up or is dead. Raises `LeaseHeld` for one who lives."""
    if record.released or record.process.is_gone():
        return record, etag
    if record.process.is_here():
        left_s = record.since_boot_s + record.duration_s - seconds_since_boot()
        if left_s > 0:
            raise _held(store, record, f"its lease runs for {left_s:.0f} s more unless it is renewed")
        return record, etag
    print(
        f"output {store.uri} was last written by {_named(record)}: this run takes over when nothing is "
        f"heard of it for {record.duration_s:g} s",
        file=progress,
        flush=True,
    )
    until_s = seconds_since_boot() + record.duration_s
    while seconds_since_boot() < until_s:
        time.sleep(record.duration_s / TRIES_A_DURATION)
        found = read_lease(store)
        if found is None or found[0].released:
            return found or (record, etag)
        if found[1] != etag:
            raise _held(store, found[0], "it has just renewed its lease")
    return record, etag


def _held(store: Store, record: LeaseRecord, why: str) -> LeaseHeld:
    return LeaseHeld(
        f"output {store.uri} is being written by {_named(record)}: {why}; let it end or stop it, and run "
        "this again"
    )


def _named(record: LeaseRecord) -> str:
    return f"another driver (process {record.process.pid} on {record.host}, renewed {record.renewed_at})"
