"""An engine that does not start: tried again in a new process, a few times, and then the end of the job."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray

from dflash_engine.errors import ConfigError
from pipelines.admission import FailedStarts, Start
from pipelines.admission_actor import AdmissionPort
from pipelines.engines import Engine
from pipelines.errors import JobError, JobRefused, job_error

TAIL_BYTES = 4096

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Starter:
    """Loads the engine of one actor."""

    admission: AdmissionPort
    starts: int
    """Failed ones in a row that end the job."""

    async def start(self, load: Callable[[], Engine]) -> Engine:
        """The engine of `load`. Ends the process where another one is to try again.

        Raises `JobRefused` where a setting is wrong, and `JobError` where it failed too often.
        """
        here = _this_actor()
        failed = await self.admission.starting(here)
        if failed.refusal is not None:
            raise job_error(failed.refusal.message, failed.refusal.exit_code)
        if failed.count >= self.starts:
            raise await self._too_often(failed.count, _last_words(failed, here))
        try:
            # On the loop's own thread: no part can go on before it is there anyway.
            engine = load()
        except ConfigError as error:
            raise JobRefused(str(error)) from error
        except JobError:
            raise
        except Exception as error:
            logger.exception("the engine did not start")
            reason = f"{type(error).__name__}: {error}"
            count = await self.admission.start_failed(here.actor)
            if count >= self.starts:
                raise await self._too_often(count, reason) from error
            end_process(f"the engine did not start: {reason}")
            raise
        await self.admission.started(here.actor)
        return engine

    async def _too_often(self, count: int, reason: str) -> JobError:
        error = JobError(f"the engine did not start in {count} tries: {reason}")
        await self.admission.refuse(str(error), error.exit_code)
        return error


def end_process(reason: str) -> None:
    """End this process at once; Ray starts another and gives it the parts that were in flight."""
    logger.critical("this process ends: %s", reason)
    logging.shutdown()
    os._exit(1)


def _this_actor() -> Start:
    try:
        log = os.readlink("/proc/self/fd/2")
    except OSError:
        log = ""
    if not ray.is_initialized():
        return Start("", "", os.getpid(), log)
    context = ray.get_runtime_context()
    return Start(context.get_actor_id() or "", context.get_node_id(), os.getpid(), log)


def _last_words(failed: FailedStarts, here: Start) -> str:
    """Why a process died while it was loading, as far as it has left anything."""
    died = failed.last
    assert died is not None
    words = ""
    if died.node == here.node and died.log != here.log and Path(died.log).is_file():
        tail = Path(died.log).read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        words = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
    where = f"process {died.pid} died while it was loading"
    if not words:
        return f"{where}, without a word: killed from outside, most often for want of memory"
    return f"{where}; the last line of {died.log} is: {words}"
