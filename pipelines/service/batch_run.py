"""One batch on its way from validating to its end, from wherever a restart finds it.

validating -> in_progress -> finalizing -> completed
    |              |-> expired, with what is done by then
    |              |-> cancelling -> cancelled, with what is done by then
    |-> failed     |-> failed, where its job cannot be run
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from pipelines.errors import NotFound
from pipelines.service.batch import Batch, BatchError, Ending, Outcome, RequestCounts, Status
from pipelines.service.batch_delivery import deliver
from pipelines.service.batch_lines import Checked, check_lines
from pipelines.service.batch_output import BatchOutput, usage_json
from pipelines.service.batch_store import BatchKey, BatchStore
from pipelines.service.batch_submitter import JobAsked, JobEnd, Submitter
from pipelines.service.batches_config import BatchesConfig
from pipelines.service.bell import Bell
from pipelines.service.file_store import FileStore
from pipelines.storage import open_store

REFUSED = 2
BUDGET_SPENT = 3
# A job that broke off is tried again until the batch expires, after pauses that double.
LONGEST_PAUSE_S = 600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Desk:
    """What all runs of a controller share."""

    settings: BatchesConfig
    batches: BatchStore
    files: FileStore
    submitter: Submitter
    is_model: Callable[[str], bool]
    model: str
    clock: Callable[[], float]
    bell: Bell
    slots: asyncio.Semaphore
    """One for each job that may run."""


class BatchRun:
    """Takes one batch to its end. Cancelled, it ends the job and leaves the rest to the next run."""

    def __init__(self, desk: Desk, key: BatchKey) -> None:
        self._desk = desk
        self._key = key
        store = open_store(desk.batches.output_uri(key), desk.settings.storage)
        self._output = BatchOutput(store, key.id, desk.model)
        self._not_before_s = 0.0
        self._num_failures = 0

    async def carry(self) -> None:
        """Raises `JobError` where the store fails; carrying it again goes on from there."""
        desk = self._desk
        while True:
            ring = desk.bell.listen()
            batch = await asyncio.to_thread(desk.batches.find, self._key)
            if batch is None:
                # Its marker is written first: it comes, or its maker died in between.
                return
            if batch.ended:
                break
            if batch.ending is not None:
                await self._finish(batch)
            elif batch.status == "cancelling":
                await self._end("cancelled")
            elif desk.clock() >= batch.expires_at:
                await self._end("expired")
            elif batch.status == "validating":
                await self._validate(batch)
            elif self._pause_s() > 0 or desk.slots.locked():
                await ring.wait(min(desk.settings.poll_s, self._pause_s() or desk.settings.poll_s))
            else:
                await self._work(batch)
        await asyncio.to_thread(self._output.delete_rows)
        await asyncio.to_thread(desk.batches.close, self._key)

    async def _validate(self, batch: Batch) -> None:
        checked = await asyncio.to_thread(self._check, batch)
        now = self._desk.clock()

        def told(batch: Batch) -> Batch:
            if batch.status != "validating":
                return batch
            if checked.errors:
                return batch.at("failed", now, errors=checked.errors)
            counts = RequestCounts(total=checked.num_requests)
            return batch.at("in_progress", now, request_counts=counts)

        await self._update(told)

    def _check(self, batch: Batch) -> Checked:
        desk = self._desk
        try:
            source = desk.files.find(self._key.owner, batch.input_file_id)
            if source is None:
                raise NotFound(batch.input_file_id)
            lines = desk.files.lines(self._key.owner, source)
            return check_lines(lines, batch.endpoint, desk.settings.max_requests, desk.is_model)
        except NotFound:
            message = f"the input file {batch.input_file_id} has been deleted"
            return Checked(0, (BatchError(code="file_not_found", message=message, param="input_file_id"),))

    async def _work(self, batch: Batch) -> None:
        """Run the job until it ends, or until the batch has to end without it."""
        async with self._slot():
            end = await self._watched(batch)
        if end is None:
            return
        if await asyncio.to_thread(self._output.is_complete):
            await self._end("completed")
        elif end.exit_code == REFUSED and await asyncio.to_thread(self._output.is_held):
            # A job of a service that has just died: it ends with it, or its lease runs out.
            self._pause(self._desk.settings.poll_s)
        elif end.exit_code in (REFUSED, BUDGET_SPENT):
            logger.error("the job of %s cannot go on: %s", batch.id, end.message)
            code = "budget_exceeded" if end.exit_code == BUDGET_SPENT else "job_refused"
            await self._end("failed", BatchError(code=code, message=_REASONS[code]))
        else:
            logger.warning("the job of %s broke off and is tried again: %s", batch.id, end.message)
            self._pause(min(LONGEST_PAUSE_S, self._desk.settings.poll_s * 2**self._num_failures))
            self._num_failures += 1

    async def _watched(self, batch: Batch) -> JobEnd | None:
        """How the job ended; None where it was stopped, because of a cancel or the time."""
        desk = self._desk
        source = desk.files.content_uri(self._key.owner, batch.input_file_id)
        output = desk.batches.output_uri(self._key)
        job = await desk.submitter.start(JobAsked(batch.id, batch.endpoint, source, output))
        waiting = asyncio.ensure_future(job.wait())
        waiting.add_done_callback(lambda _: desk.bell.ring())
        try:
            while True:
                ring = desk.bell.listen()
                batch = await self._count()
                if batch.status != "in_progress" or desk.clock() >= batch.expires_at:
                    return None
                if waiting.done():
                    return waiting.result()
                await ring.wait(desk.settings.poll_s)
        finally:
            waiting.cancel()
            await job.stop()

    async def _count(self) -> Batch:
        """Bring the counts of the batch up to what its job has written."""
        totals = await asyncio.to_thread(self._output.totals)

        def counted(batch: Batch) -> Batch:
            counts = batch.request_counts.model_copy(
                update={"completed": totals.rows_ok, "failed": totals.rows_error}
            )
            return batch.model_copy(update={"request_counts": counts})

        return await self._update(counted)

    async def _end(self, outcome: Outcome, *errors: BatchError) -> None:
        """Decide how the batch ends; who asked for a cancel in between gets it."""
        files, now = self._desk.files, self._desk.clock()

        def decided(batch: Batch) -> Batch:
            asked: Outcome = "cancelled" if batch.status == "cancelling" else outcome
            ending = Ending(outcome=asked, output_file_id=files.new_id(), error_file_id=files.new_id())
            batch = batch.model_copy(update={"ending": ending, "errors": (*batch.errors, *errors)})
            return batch.at("finalizing", now) if asked == "completed" else batch

        await self._update(decided)

    async def _finish(self, batch: Batch) -> None:
        """Write the files, and then say that the batch has ended."""
        assert batch.ending is not None
        outcome: Status = batch.ending.outcome
        delivery = await asyncio.to_thread(deliver, self._key, batch, self._output, self._desk.files)
        totals = await asyncio.to_thread(self._output.totals)
        now = self._desk.clock()
        await self._update(
            lambda batch: batch.at(
                outcome,
                now,
                output_file_id=delivery.output_file_id,
                error_file_id=delivery.error_file_id,
                request_counts=delivery.counts,
                usage=usage_json(totals),
            )
        )

    async def _update(self, change: Callable[[Batch], Batch]) -> Batch:
        return await asyncio.to_thread(self._desk.batches.update, self._key, change)

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None, None]:
        async with self._desk.slots:
            yield
        self._desk.bell.ring()

    def _pause(self, seconds: float) -> None:
        self._not_before_s = asyncio.get_running_loop().time() + seconds

    def _pause_s(self) -> float:
        return max(0.0, self._not_before_s - asyncio.get_running_loop().time())


_REASONS = {
    "budget_exceeded": "the budget of the batch's job is spent; what was done until then is in its files",
    "job_refused": "the batch's job could not be run here; the service's log says why",
}
