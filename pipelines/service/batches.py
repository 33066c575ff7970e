"""Files, batches and their controller, over the root that a config names."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pipelines.service.batch_controller import BatchController
from pipelines.service.batch_run import Desk
from pipelines.service.batch_store import BatchStore
from pipelines.service.batch_submitter import ProcessSubmitter, Submitter
from pipelines.service.batches_config import BatchesConfig
from pipelines.service.bell import Bell
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_client import ServedModel
from pipelines.service.file_store import FileStore
from pipelines.storage import open_store


@dataclass(frozen=True, slots=True)
class Batches:
    """What the routes need of files and batches."""

    settings: BatchesConfig
    files: FileStore
    batches: BatchStore
    controller: BatchController
    bell: Bell
    """Rung when a batch was made or is to be cancelled; of the loop that the controller runs on."""
    clock: Callable[[], float]

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """The controller runs inside; leaving ends its jobs, which the next one goes on with."""
        task = asyncio.ensure_future(self.controller.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def open_batches(
    config: ServiceConfig,
    model: ServedModel,
    submitter: Submitter | None = None,
    clock: Callable[[], float] = time.time,
) -> Batches | None:
    """None where the config has no `batches`. Raises `ConfigError` for a bad job file."""
    settings = config.batches
    if settings is None:
        return None
    store = open_store(settings.root, settings.storage)
    files, batches, bell = FileStore(store, clock), BatchStore(store, clock), Bell()
    desk = Desk(
        settings=settings,
        batches=batches,
        files=files,
        submitter=submitter
        or ProcessSubmitter(settings, config.default_temperature, config.default_max_tokens),
        is_model=model.is_called,
        model=model.name,
        clock=clock,
        bell=bell,
        slots=asyncio.Semaphore(settings.jobs_at_once),
    )
    return Batches(settings, files, batches, BatchController(store, desk), bell, clock)
