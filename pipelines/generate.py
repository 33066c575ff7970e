"""Shards to written parts: an actor with one engine, and rows of several shards in it together.

A row that cannot be answered is data. No exception leaves a call, for one would end the whole dataset:
what ends the job goes into the receipt, and a dead engine ends the process so that Ray starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError, EngineDead, RequestError
from dflash_engine.request import Request, Result
from pipelines.cost import CPU, Price, PriceTable
from pipelines.engines import Engine, EngineFactory, open_engine
from pipelines.errors import JobError, JobRefused
from pipelines.job import check_fingerprint
from pipelines.receipt import Receipt
from pipelines.rows import InputRow, RowError, decode_rows, seed_for
from pipelines.write import ErrorRecord, OutputRow, PartWriter

# Twice what the engine runs at once: it never waits for a row, and no more sits in its queue than helps.
QUEUED_PER_SEQUENCE = 2

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
    actors: int
    """Most actors of the job, which share the cores where there is no GPU."""
    use_gpu: bool


class Generate:
    """Ray Data calls this with one shard at a time, several at once on one event loop."""

    def __init__(self, spec: GenerateSpec, factory: EngineFactory = open_engine) -> None:
        self._spec = spec
        self._factory = factory
        self._lock = asyncio.Lock()
        self._engine: Engine | None = None
        self._failure: JobError | None = None
        self._slots = asyncio.Semaphore(QUEUED_PER_SEQUENCE * spec.engine.limit("max_num_seqs", "cuda"))

    async def __call__(self, shard: dict[str, Any]) -> dict[str, Any]:
        shard_id = shard["shard_id"]
        try:
            receipt = await self._receipt(shard)
        except EngineDead as error:
            self._die(error)
            raise
        except JobError as error:
            receipt = Receipt(shard_id=shard_id, failure=str(error), exit_code=error.exit_code)
        except Exception as error:
            logger.exception("shard %s failed", shard_id)
            reason = f"shard {shard_id} failed: {type(error).__name__}: {error}"
            receipt = Receipt(shard_id=shard_id, failure=reason, exit_code=JobError.exit_code)
        return receipt.as_record()

    async def _receipt(self, shard: Mapping[str, Any]) -> Receipt:
        shard_id, writer = shard["shard_id"], self._spec.writer
        if await asyncio.to_thread(writer.is_written, shard_id):
            return Receipt(shard_id=shard_id, input_bytes=shard["input_bytes"], already_written=True)
        engine = await self._opened_engine()
        rows = await asyncio.to_thread(decode_rows, shard["payload"])
        answers = await asyncio.gather(*(self._answer(engine, row) for row in rows))
        price = self._price()
        outputs = [
            _output(row, answer, price, self._spec.engine) for row, answer in zip(rows, answers, strict=True)
        ]
        errors = [
            ErrorRecord(row, shard["file"], answer)
            for row, answer in zip(rows, answers, strict=True)
            if isinstance(answer, RowError)
        ]
        totals = await asyncio.to_thread(writer.write, shard_id, outputs, errors)
        return Receipt(shard_id=shard_id, input_bytes=shard["input_bytes"], totals=totals)

    async def _opened_engine(self) -> Engine:
        """The engine, loaded by the first call; one that cannot start fails all calls alike."""
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._engine is None:
                try:
                    self._price()
                    # On the loop's own thread: shards cannot go on before it is there anyway.
                    engine = self._factory(self._engine_config())
                    check_fingerprint(self._spec.writer.store, engine.fingerprint)
                except ConfigError as error:
                    self._failure = JobRefused(str(error))
                    raise self._failure from error
                except JobError as error:
                    self._failure = error
                    raise
                except Exception as error:
                    logger.exception("the engine did not start")
                    self._failure = JobError(f"the engine did not start: {type(error).__name__}: {error}")
                    raise self._failure from error
                self._engine = engine
            return self._engine

    def _engine_config(self) -> EngineConfig:
        """On a CPU, threads are set here: Ray tells libraries to use no more than the actor's CPUs."""
        config = self._spec.engine
        if self._spec.use_gpu or config.threads is not None:
            return config
        return config.model_copy(
            update={"threads": max(1, len(os.sched_getaffinity(0)) // self._spec.actors)}
        )

    def _price(self) -> Price:
        name = self._spec.accelerator or (_accelerator() if self._spec.use_gpu else CPU)
        return self._spec.prices.price(name)

    async def _answer(self, engine: Engine, row: InputRow) -> Result | RowError:
        if row.request is None:
            assert row.error is not None
            return row.error
        async with self._slots:
            try:
                result = await engine.generate(self._seeded(row.request, row.row_id))
            except RequestError as error:
                return RowError(error.code, str(error))
            except EngineDead:
                raise
            except Exception as error:
                logger.exception("row %s failed", row.row_id)
                return RowError("internal_error", f"{type(error).__name__}: {error}")
        if result.error is not None:
            return RowError(result.error.code, str(result.error))
        return result

    def _seeded(self, request: Request, row_id: str) -> Request:
        if request.sampling.seed is not None:
            return request
        seed = seed_for(self._spec.job_seed, row_id)
        return replace(request, sampling=request.sampling.model_copy(update={"seed": seed}))

    def _die(self, error: EngineDead) -> None:
        """End this process at once; Ray starts another and gives it the shards that were in flight."""
        logger.critical("the engine died: %s", error)
        logging.shutdown()
        os._exit(1)


def _accelerator() -> str:
    """What Ray calls the accelerator of this machine."""
    node_id = ray.get_runtime_context().get_node_id()
    resources: dict[str, float] = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    names = [
        name.removeprefix("accelerator_type:") for name in resources if name.startswith("accelerator_type:")
    ]
    if not names:
        raise JobRefused("Ray knows no accelerator on this machine; set prices.accelerator")
    return names[0]


def _output(row: InputRow, answer: Result | RowError, price: Price, engine: EngineConfig) -> OutputRow:
    usage = answer.usage if isinstance(answer, Result) else None
    # The engine's time is that of all its GPUs at once.
    busy_ns = usage.busy_ns * engine.tensor_parallel_size if usage else 0
    error = answer if isinstance(answer, RowError) else None
    columns = {
        "row_id": row.row_id,
        "custom_id": row.custom_id,
        "status": "ok" if error is None else "error",
        "text": answer.text if isinstance(answer, Result) else None,
        "finish_reason": answer.finish_reason if isinstance(answer, Result) else None,
        "prompt_tokens": usage.prompt_tokens if usage else 0,
        "cached_tokens": usage.cached_tokens if usage else 0,
        "completion_tokens": usage.completion_tokens if usage else 0,
        "steps": usage.steps if usage else 0,
        "drafted_tokens": usage.drafted_tokens if usage else 0,
        "accepted_tokens": usage.accepted_tokens if usage else 0,
        "gpu_seconds": busy_ns / 1e9,
        "cost_usd": price.cost_usd(busy_ns),
        "error_type": error and error.code,
        "error_message": error and error.message,
        "model": engine.model,
    }
    return OutputRow(columns, row.carried, _logprobs(answer))


def _logprobs(answer: Result | RowError) -> list[dict[str, Any]] | None:
    if isinstance(answer, RowError) or answer.logprobs is None:
        return None
    return [
        {
            "token": item.token,
            "logprob": item.logprob,
            "top": [{"token": token, "logprob": logprob} for token, logprob in item.top],
        }
        for item in answer.logprobs
    ]
