"""Shards to written parts: an actor with one engine, and rows of several shards in it together.

A row that cannot be answered is data. No exception leaves a call, for one would end the whole dataset:
what ends the job goes into the receipt, and a dead engine ends the process so that Ray starts another. What
an actor must not forget when it dies it tells the admission, which lives elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from dflash_engine.config import EngineConfig
from dflash_engine.errors import EngineDead
from dflash_engine.heap import settle_heap
from dflash_engine.request import SamplingParams
from pipelines.admission_actor import AdmissionPort
from pipelines.answers import Answer, Answerer
from pipelines.attempts import CRASH_CODE, Attempts
from pipelines.config import TriesConfig
from pipelines.cost import CPU, Price, PriceTable
from pipelines.engines import Engine, EngineFactory, PromptEncoder, open_encoder, open_engine
from pipelines.errors import JobError, JobRefused
from pipelines.gate import Gate
from pipelines.job import check_fingerprint, check_same_store
from pipelines.output import Bill, error_records, output_rows
from pipelines.receipt import Receipt
from pipelines.redo import Redo, Task, task_of
from pipelines.rows import InputRow, RowError, decode_rows
from pipelines.starting import Starter, end_process
from pipelines.totals import Totals
from pipelines.write import Part, PartWriter

# Twice what the engine runs at once: it never waits for a row, and no more sits in its queue than helps.
QUEUED_PER_SEQUENCE = 2
# An object store that is away for a moment costs a wait, and not the shard: 0.5, 1 and 2 s.
WRITE_TRIES = 4
WRITE_WAIT_S = 0.5
# An actor that dies says why, unless nobody listens.
LAST_WORDS_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """Everything an actor is told once."""

    engine: EngineConfig
    writer: PartWriter
    prices: PriceTable
    accelerator: str | None
    """Which price holds; None asks Ray what this machine has."""
    job_seed: int
    defaults: SamplingParams
    """What rows that were put right do not say themselves."""
    actors: int
    """Most actors of the job, which share the cores where there is no GPU."""
    use_gpu: bool
    tries: TriesConfig
    admission: AdmissionPort
    redos: Mapping[str, Redo]
    """Shards of which some rows are done again, by their ids."""
    dedupe: bool = False
    output_token_ids: bool = False


class Generate:
    """Ray Data calls this with one shard at a time, several at once on one event loop."""

    def __init__(self, spec: GenerateSpec, factory: EngineFactory = open_engine) -> None:
        self._spec = spec
        self._factory = factory
        self._lock = asyncio.Lock()
        self._gate = Gate()
        self._answerer: Answerer | None = None
        self._encoder: PromptEncoder | None = None
        self._failure: JobError | None = None
        self._parts: set[Part] = set()

    async def __call__(self, shard: dict[str, Any]) -> dict[str, Any]:
        shard_id = shard["shard_id"]
        try:
            receipt = await self._receipt(shard)
        except JobError as error:
            receipt = Receipt(shard_id=shard_id, failure=str(error), exit_code=error.exit_code)
        except Exception as error:
            logger.exception("shard %s failed", shard_id)
            reason = f"shard {shard_id} failed: {type(error).__name__}: {error}"
            receipt = Receipt(shard_id=shard_id, failure=reason, exit_code=JobError.exit_code)
        return receipt.as_record()

    async def _receipt(self, shard: Mapping[str, Any]) -> Receipt:
        shard_id, writer, admission = shard["shard_id"], self._spec.writer, self._spec.admission
        redo = self._spec.redos.get(shard_id)
        part = redo.part if redo else Part(shard_id)
        if await asyncio.to_thread(writer.is_written, part):
            # An earlier attempt wrote it and died before it could say so.
            totals = await asyncio.to_thread(writer.read_totals, part)
            await admission.end(part, totals)
            return Receipt(shard_id=shard_id, input_bytes=shard["input_bytes"], totals=totals)
        attempts = await admission.look(part)
        answerer = await self._opened()
        rows = await asyncio.to_thread(decode_rows, shard["payload"])
        task = await asyncio.to_thread(task_of, writer, rows, redo, self._spec.defaults)
        async with self._gate.alone() if attempts.deaths else self._gate.together():
            if refusal := await admission.admit(part, len(task.rows)):
                return Receipt(shard_id=shard_id, failure=refusal.message, exit_code=refusal.exit_code)
            self._parts.add(part)
            try:
                answers = await self._answers(answerer, part, task.rows, attempts)
            except EngineDead as error:
                # In here, so that no part that waits to be alone is let in and blamed.
                await self._die(error)
                raise
            totals = await self._write(part, task, answers)
            await admission.end(part, totals)
            self._parts.discard(part)
        reason = next((answer.message for answer in answers if isinstance(answer, RowError)), None)
        return Receipt(shard_id=shard_id, input_bytes=shard["input_bytes"], totals=totals, first_error=reason)

    async def _answers(
        self, answerer: Answerer, part: Part, rows: Sequence[InputRow], attempts: Attempts
    ) -> list[Answer]:
        """The answers in the order of the rows; of a part that killed its engine, in groups."""
        if not attempts.deaths:
            return await answerer.answer_all(rows)
        crashes = self._spec.tries.crash
        answers: dict[int, Answer] = {
            row: RowError(CRASH_CODE, _crash_message(attempts, row))
            for row in attempts.given_up(range(len(rows)), crashes)
        }
        for group in attempts.groups(range(len(rows)), crashes):
            await self._spec.admission.trying(part, group)
            found = await answerer.answer_all([rows[row] for row in group])
            answers.update(zip(group, found, strict=True))
        return [answers[row] for row in range(len(rows))]

    async def _write(self, part: Part, task: Task, answers: Sequence[Answer]) -> Totals:
        bill = Bill(self._price(), self._spec.engine, self._encoder)
        for number in range(1, WRITE_TRIES + 1):
            try:
                return await asyncio.to_thread(_put, self._spec.writer, part, task, answers, bill)
            except JobRefused:
                raise
            except JobError:
                if number == WRITE_TRIES:
                    raise
                logger.exception("part %s was not written, try %d of %d", part.name, number, WRITE_TRIES)
                await asyncio.sleep(WRITE_WAIT_S * 2 ** (number - 1))
        raise AssertionError("a part is written at least once")

    async def _opened(self) -> Answerer:
        """The engine, loaded by the first call; one that cannot start fails all calls alike."""
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._answerer is None:
                try:
                    self._answerer = await self._open()
                except JobError as error:
                    self._failure = error
                    raise
            return self._answerer

    async def _open(self) -> Answerer:
        spec = self._spec
        check_same_store(spec.writer.store)
        self._price()
        starter = Starter(spec.admission, spec.tries.start)
        engine = await starter.start(self._load)
        settle_heap()
        slots = QUEUED_PER_SEQUENCE * spec.engine.limit("max_num_seqs", "cuda")
        if spec.output_token_ids:
            self._encoder = await asyncio.to_thread(open_encoder, spec.engine)
        return Answerer(engine, slots, spec.job_seed, spec.tries.row, dedupe=spec.dedupe)

    def _load(self) -> Engine:
        engine = self._factory(self._engine_config())
        check_fingerprint(self._spec.writer.store, engine.fingerprint)
        return engine

    def _engine_config(self) -> EngineConfig:
        """On a CPU, threads are set here: Ray tells libraries to use no more than the actor's CPUs."""
        config = self._spec.engine
        if self._spec.use_gpu or config.threads is not None:
            return config
        return config.model_copy(
            update={"threads": max(1, len(os.sched_getaffinity(0)) // self._spec.actors)}
        )

    def _price(self) -> Price:
        name = self._spec.accelerator or (accelerator() if self._spec.use_gpu else CPU)
        return self._spec.prices.price(name)

    async def _die(self, error: EngineDead) -> None:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._spec.admission.dying(list(self._parts), reason), LAST_WORDS_S)
        end_process(f"the engine died: {reason}")


def _put(writer: PartWriter, part: Part, task: Task, answers: Sequence[Answer], bill: Bill) -> Totals:
    rows = output_rows(task.rows, answers, bill)
    return writer.write(part, rows, error_records(task.rows, answers), task.base)


def _crash_message(attempts: Attempts, row: int) -> str:
    kills = attempts.kills.get(row, 0)
    if kills:
        times = "once" if kills == 1 else f"{kills} times"
        return f"the engine died {times} while this row was alone in it: {attempts.reason}"
    deaths = f"the engine died {attempts.deaths} times under rows of this shard"
    return f"not tried again: {deaths}: {attempts.reason}"


def accelerator() -> str:
    """What Ray calls the accelerator of this machine."""
    node_id = ray.get_runtime_context().get_node_id()
    resources: dict[str, float] = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    names = [
        name.removeprefix("accelerator_type:") for name in resources if name.startswith("accelerator_type:")
    ]
    if not names:
        raise JobRefused("Ray knows no accelerator on this machine; set prices.accelerator")
    return names[0]
