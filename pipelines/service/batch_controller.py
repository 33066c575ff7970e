"""Whoever runs batches: one of all services that share a root, by a lease in it.

The others stand by. A controller that begins looks at every batch that has not ended and goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator

from pipelines.errors import JobError
from pipelines.lease import Lease, LeaseHeld, take_lease
from pipelines.service.batch_run import BatchRun, Desk
from pipelines.service.batch_store import BatchKey
from pipelines.storage import Store

SWEEP_S = 3600.0
"""How often expired files are looked for."""

logger = logging.getLogger(__name__)


class BatchController:
    """Runs until it is cancelled; then its jobs end, and their batches wait for the next controller."""

    def __init__(self, store: Store, desk: Desk) -> None:
        self._store = store
        self._desk = desk
        self._runs: dict[BatchKey, asyncio.Task[None]] = {}

    async def run(self) -> None:
        poll_s = self._desk.settings.poll_s
        while True:
            try:
                async with self._lease() as lease:
                    await self._lead(lease)
            except LeaseHeld:
                logger.debug("another controller runs the batches")
            except JobError as error:
                logger.warning("batches are not being run: %s", error)
            await asyncio.sleep(poll_s)

    async def _lead(self, lease: Lease) -> None:
        """Carry every open batch, until the lease is lost."""
        loop, bell = asyncio.get_running_loop(), self._desk.bell

        def lost(_: str) -> None:
            # On the lease's thread, and perhaps when the loop has ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(bell.ring)

        lease.when_lost(lost)
        sweeping = asyncio.ensure_future(self._sweep_for_ever())
        try:
            while True:
                ring = bell.listen()
                lease.check()
                for key in await self._open():
                    if key not in self._runs:
                        self._begin(key)
                await ring.wait(self._desk.settings.poll_s)
        finally:
            await _ended([sweeping, *self._runs.values()])

    async def _open(self) -> list[BatchKey]:
        """Jobs that run do not end because the store cannot be listed for a while."""
        try:
            return await asyncio.to_thread(self._desk.batches.open_batches)
        except JobError as error:
            logger.warning("new batches cannot be seen: %s", error)
            return []

    def _begin(self, key: BatchKey) -> None:
        run = asyncio.ensure_future(BatchRun(self._desk, key).carry())
        self._runs[key] = run
        run.add_done_callback(lambda run: self._ended(key, run))

    def _ended(self, key: BatchKey, run: asyncio.Task[None]) -> None:
        """One that failed is begun again when the batches are looked through the next time."""
        del self._runs[key]
        if not run.cancelled() and (error := run.exception()) is not None:
            logger.error("batch %s was interrupted", key.id, exc_info=error)

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._sweep)
            except JobError as error:
                logger.warning("expired files were not removed: %s", error)
            await asyncio.sleep(SWEEP_S)

    def _sweep(self) -> None:
        for owner in self._desk.files.owners():
            self._desk.files.delete_expired(owner)

    @contextlib.asynccontextmanager
    async def _lease(self) -> AsyncGenerator[Lease, None]:
        """The lease on the root, given back at the end. Raises as `take_lease` does."""
        duration_s = self._desk.settings.lease_s
        taking = asyncio.ensure_future(asyncio.to_thread(_take, self._store, duration_s))
        try:
            lease = await asyncio.shield(taking)
        except asyncio.CancelledError:
            # It waits in a thread, which nobody can call back.
            with contextlib.suppress(JobError):
                (await taking).__exit__(None, None, None)
            raise
        try:
            yield lease
        finally:
            await asyncio.to_thread(lease.__exit__, None, None, None)


def _take(store: Store, duration_s: float) -> Lease:
    with open(os.devnull, "w") as nowhere:
        return take_lease(store, duration_s, nowhere)


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
