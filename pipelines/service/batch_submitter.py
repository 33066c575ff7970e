"""How a batch's job is run: the seam, and the way that needs nothing but this machine's Python."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash_engine.errors import ConfigError
from pipelines.config import BatchConfig, load_config
from pipelines.errors import JobRefused
from pipelines.openai_line import CHAT_URL, TEXT_URL
from pipelines.service.batches_config import BatchesConfig
from pipelines.service.openai_completions import DEFAULT_MAX_TOKENS

MODULE = "pipelines.service.batch_process"
CODE = Path(__file__).resolve().parents[2]
LAST_WORDS_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobAsked:
    """A batch as a job: where its requests are, and where its parts go."""

    batch_id: str
    endpoint: str
    input: str
    output: str


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended, in the exit codes of `batch_generate`, and the last thing it said."""

    exit_code: int
    message: str = ""


class RunningJob(Protocol):
    """A job that was started."""

    async def wait(self) -> JobEnd: ...
    async def stop(self) -> None:
        """End it, if it still runs; it has ended when this returns. What it has written stays."""
        ...


class Submitter(Protocol):
    """Starts jobs. Starting one again for the same output goes on with it."""

    async def start(self, asked: JobAsked) -> RunningJob: ...


class ProcessSubmitter:
    """Each job in a process of its own, which ends with this one. Raises `ConfigError` for a bad job file.

    The defaults of a request are those of the API, wherever the job's file says otherwise.
    """

    def __init__(self, settings: BatchesConfig, temperature: float, max_tokens: int | None) -> None:
        self._settings = settings
        self._changes = [f"sampling.temperature={temperature}"]
        if max_tokens is not None:
            self._changes.append(f"sampling.max_tokens={max_tokens}")
        try:
            self.config(JobAsked("", CHAT_URL, settings.root, settings.root))
        except JobRefused as error:
            raise ConfigError(f"batches.job: {error}") from error

    async def start(self, asked: JobAsked) -> RunningJob:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            env=environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(self.message(asked))
            await process.stdin.drain()
        return _Process(process, asked.batch_id, self._settings.stop_s)

    def message(self, asked: JobAsked) -> bytes:
        """What the process reads: only what was given, for rows tell that from defaults nobody asked for."""
        return self.config(asked).model_dump_json(exclude_unset=True).encode() + b"\n"

    def config(self, asked: JobAsked) -> BatchConfig:
        """Everything that a job is told. Raises `JobRefused` for a bad job file."""
        settings = self._settings
        changes = list(self._changes)
        if asked.endpoint == TEXT_URL:
            changes.append(f"sampling.max_tokens={DEFAULT_MAX_TOKENS}")
        return load_config(
            str(settings.job),
            [*changes, *settings.settings],
            input=asked.input,
            output=asked.output,
            storage=settings.storage.resolved(),
            format="openai",
        )


def environment() -> dict[str, str]:
    """A job's: with this code, and in a replica of Ray Serve with its cluster, which Ray tells no child."""
    paths = [str(CODE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    values = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        values["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    return values


class _Process:
    """Implements `RunningJob`."""

    def __init__(self, process: asyncio.subprocess.Process, batch_id: str, stop_s: float) -> None:
        self._process = process
        self._batch_id = batch_id
        self._stop_s = stop_s
        self._said = ""
        self._reading = asyncio.ensure_future(self._read())

    async def wait(self) -> JobEnd:
        exit_code = await self._process.wait()
        # A process that the job has left behind may hold the other end of the pipe.
        await asyncio.wait([self._reading], timeout=LAST_WORDS_S)
        return JobEnd(exit_code, self._said)

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), self._stop_s)
            except TimeoutError:
                logger.warning("the job of %s did not end by itself", self._batch_id)
                self._process.kill()
        await self._process.wait()
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        """The job's progress to the log; of what it said last, an error is made."""
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(1 << 16):
            lines = [line.strip() for line in chunk.decode(errors="replace").splitlines() if line.strip()]
            for line in lines:
                logger.info("%s: %s", self._batch_id, line)
            self._said = lines[-1] if lines else self._said
