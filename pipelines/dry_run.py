"""Everything that can be known of a job before it starts: all rows read and checked, a few of them answered.

Prompts are counted and the sample is answered where the engine would run, by one worker of the cluster.
Nothing is written.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import ray
from ray.exceptions import RayError

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError, EngineDead, RequestError
from dflash_engine.request import Result
from pipelines.answers import Answerer
from pipelines.batch import find_checked
from pipelines.cluster import ray_cluster
from pipelines.config import BatchConfig
from pipelines.cost import CPU, Price, PriceTable, load_prices
from pipelines.engines import EngineFactory, PromptEncoder, open_encoder, open_engine
from pipelines.errors import JobError, JobRefused
from pipelines.estimate import Estimate, Measured
from pipelines.generate import accelerator
from pipelines.pool import ACTOR_CPUS, most_actors, use_gpus
from pipelines.read import Reader
from pipelines.rows import InputRow, decode_rows, encode_rows
from pipelines.shards import cut_rule, plan, read_tasks
from pipelines.storage import open_store

COUNTS_AHEAD = 4
"""Shards whose prompts are being counted while the next is read."""
LOG_INTERVAL_S = 5.0


class Probe:
    """The worker: a tokenizer first and, if rows are to be answered, an engine."""

    def __init__(self, engine: EngineConfig, factory: EngineFactory) -> None:
        self._config = engine
        self._factory = factory
        self._encoder: PromptEncoder | None = None

    def count(self, payload: bytes) -> list[int | tuple[str, str]] | str:
        """Tokens of each row's prompt, or code and message of why it cannot be answered; or why the model
        cannot be counted for at all."""
        if self._encoder is None:
            try:
                self._encoder = open_encoder(self._config)
            except ConfigError as error:
                return str(error)
        return [_counted(self._encoder, row) for row in decode_rows(payload)]

    def answer(self, payload: bytes, job_seed: int, prices: PriceTable, name: str | None) -> Any:
        """Per row its (completion tokens, busy ns) or the reason why it has none, and the price that holds;
        or why the engine does not start."""
        try:
            price = prices.price(name or accelerator())
            engine = self._factory(self._config)
        except (ConfigError, JobError) as error:
            return str(error)
        answerer = Answerer(engine, self._config.limit("max_num_seqs", "cuda"), job_seed, 1)
        try:
            answers = asyncio.run(answerer.answer_all(decode_rows(payload)))
        except EngineDead as error:
            return f"the engine died: {error}"
        told = [
            (answer.usage.completion_tokens, answer.usage.busy_ns)
            if isinstance(answer, Result)
            else answer.code
            for answer in answers
        ]
        return told, price


def _counted(encoder: PromptEncoder, row: InputRow) -> int | tuple[str, str]:
    if row.error is not None:
        return row.error.code, row.error.message
    assert row.request is not None
    try:
        return len(encoder.encode(row.request))
    except RequestError as error:
        return error.code, str(error)


@dataclass(slots=True)
class Found:
    """What was read so far, and a fair sample of the rows that can be answered."""

    sample_rows: int
    noise: random.Random
    parts: int = 0
    rows_ok: int = 0
    prompt_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    sample: list[InputRow] = field(default_factory=list)

    def add(self, rows: Sequence[InputRow], counts: Sequence[int | tuple[str, str]]) -> None:
        """A shard with its prompts' lengths."""
        self.parts += 1
        for row, count in zip(rows, counts, strict=True):
            if isinstance(count, int):
                self.prompt_tokens += count
                self._draw(row)
                self.rows_ok += 1
            else:
                self.errors[count[0]] += 1

    def line(self) -> str:
        """The state in one line."""
        errors = f" ({self.errors.total():,} bad)" if self.errors else ""
        return f"{self.rows_ok + self.errors.total():,} rows checked{errors} · {self.prompt_tokens:,} tokens"

    def _draw(self, row: InputRow) -> None:
        """Each of n rows is in the sample with the same chance (Vitter's algorithm R)."""
        if len(self.sample) < self.sample_rows:
            self.sample.append(row)
        elif (place := self.noise.randrange(self.rows_ok + 1)) < self.sample_rows:
            self.sample[place] = row


def dry_run(
    config: BatchConfig, sample_rows: int, progress: TextIO, factory: EngineFactory = open_engine
) -> Estimate:
    """Read, check and count every row, and answer `sample_rows` of them, drawn by the job's seed.

    Raises `JobRefused` for what `run_batch` would refuse, except for what the output holds already.
    """
    started = time.monotonic()
    source = find_checked(config)
    reader = Reader(source.store, cut_rule(config), config.sampling)
    shards = (
        shard.rows for task in read_tasks(plan(source, cut_rule(config))) for shard in reader.shards(task)
    )
    found = Found(sample_rows, random.Random(config.seed))
    with ray_cluster():
        on_gpus = use_gpus(config)
        probe: Any = (
            ray.remote(Probe)
            .options(
                num_cpus=0 if on_gpus else ACTOR_CPUS,
                num_gpus=config.engine.tensor_parallel_size if on_gpus else None,
            )
            .remote(config.engine, factory)
        )
        try:
            logged = time.monotonic()
            for rows, counts in _with_counts(shards, probe):
                found.add(rows, counts)
                if time.monotonic() - logged >= LOG_INTERVAL_S:
                    logged = time.monotonic()
                    print(found.line(), file=progress, flush=True)
            sample, sample_errors, price = _answered(config, found.sample, probe, on_gpus)
        except RayError as error:
            raise JobError(f"the dry run broke off: {str(error).splitlines()[0]}") from error
        finally:
            ray.kill(probe)
        engines = most_actors(config)
    return Estimate(
        output=open_store(config.output, config.storage).uri,
        model=config.engine.model,
        parts=found.parts,
        rows_ok=found.rows_ok,
        errors=found.errors,
        prompt_tokens=found.prompt_tokens,
        elapsed_s=time.monotonic() - started,
        sample=sample,
        sample_errors=sample_errors,
        price=price,
        engines=engines,
    )


def _with_counts(
    shards: Iterator[tuple[InputRow, ...]], probe: Any
) -> Iterator[tuple[tuple[InputRow, ...], list[int | tuple[str, str]]]]:
    waiting: deque[tuple[tuple[InputRow, ...], Any]] = deque()
    for rows in shards:
        waiting.append((rows, probe.count.remote(encode_rows(rows))))
        if len(waiting) > COUNTS_AHEAD:
            yield _count_of(*waiting.popleft())
    while waiting:
        yield _count_of(*waiting.popleft())


def _count_of(
    rows: tuple[InputRow, ...], asked: Any
) -> tuple[tuple[InputRow, ...], list[int | tuple[str, str]]]:
    counts = ray.get(asked)
    if isinstance(counts, str):
        raise JobRefused(counts)
    return rows, counts


def _answered(
    config: BatchConfig, rows: Sequence[InputRow], probe: Any, on_gpus: bool
) -> tuple[list[Measured], Counter[str], Price | None]:
    if not rows:
        return [], Counter(), None
    name = config.prices.accelerator or (None if on_gpus else CPU)
    told = ray.get(probe.answer.remote(encode_rows(rows), config.seed, load_prices(config.prices.path), name))
    if isinstance(told, str):
        raise JobRefused(told)
    answers, price = told
    errors = Counter(answer for answer in answers if isinstance(answer, str))
    return [Measured(*answer) for answer in answers if not isinstance(answer, str)], errors, price
