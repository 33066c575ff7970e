"""A batch job from input to manifest: read, generate, price and write, sum up.

find_input -> plan -> begin -> [ read -> generate -> receipts ] -> manifest
                                 Ray Data, one row a shard
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy
from ray.exceptions import RayError

from dflash_engine.errors import ConfigError
from pipelines.cluster import configure_data, num_cpus, num_gpus, ray_cluster
from pipelines.config import BatchConfig
from pipelines.cost import PriceTable, load_prices
from pipelines.engines import EngineFactory, check_model, open_engine
from pipelines.errors import JobError, JobRefused
from pipelines.generate import Generate, GenerateSpec
from pipelines.inputs import Input, apply_limit, find_input
from pipelines.job import begin, identity
from pipelines.manifest import read_summary, write_manifest
from pipelines.progress import JobProgress
from pipelines.read import Reader, ShardSource, sample_rows
from pipelines.receipt import Receipt, receipt_from_record
from pipelines.report import Summary
from pipelines.rows import carried_kinds
from pipelines.shards import Piece, left_to_do, plan, read_tasks
from pipelines.storage import local_path, open_store
from pipelines.totals import Totals
from pipelines.write import PartWriter

# Less than an actor's, on purpose: with equal resources Ray Data fuses reading into the actor, and its
# event loop would stand still while it parses.
READ_CPUS = 0.25
ACTOR_CPUS = 1


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job that may start: everything found and checked."""

    config: BatchConfig
    source: Input
    prices: PriceTable
    writer: PartWriter


def run_batch(config: BatchConfig, progress: TextIO, factory: EngineFactory = open_engine) -> Summary:
    """Do what is left of a job and sum it up; progress goes to `progress`, engines come from `factory`.

    Raises `JobRefused` where it cannot start as asked and `JobError` where it breaks off.
    """
    started = time.monotonic()
    job = prepare(config)
    if (summary := read_summary(job.writer.store)) is not None:
        return summary
    done = job.writer.written_shards()
    if done:
        print(f"{len(done):,} shards are already written; the rest is left to do", file=progress)
    pieces = left_to_do(plan(job.source, config.shard), done)
    if pieces:
        reader = Reader(job.source.store, config.shard, config.sampling, done)
        total_bytes = sum(piece.input_bytes for piece in pieces)
        with ray_cluster(), JobProgress(total_bytes, progress) as bar:
            for receipt in follow(generate(read(pieces, reader), job, factory)):
                bar.add(receipt)
    return write_manifest(job.writer, config, job.prices, time.monotonic() - started)


def dry_run(config: BatchConfig) -> Summary:
    """Read and check every row, generate and write nothing: how many rows could be sent to the engine.

    Raises `JobRefused` for what `run_batch` would refuse, except for what the output holds already.
    """
    started = time.monotonic()
    source = find_checked(config)
    reader = Reader(source.store, config.shard, config.sampling)
    totals = Totals()
    parts = 0
    for task in read_tasks(plan(source, config.shard)):
        for shard in reader.shards(task):
            bad = sum(row.error is not None for row in shard.rows)
            totals += Totals(rows_ok=len(shard.rows) - bad, rows_error=bad)
            parts += 1
    elapsed_s = time.monotonic() - started
    output = open_store(config.output).uri
    model = config.engine.model
    return Summary(output=output, model=model, totals=totals, elapsed_s=elapsed_s, parts=parts, dry_run=True)


def find_checked(config: BatchConfig) -> Input:
    """The input of a job whose prices and model are there too. Raises `JobRefused`."""
    source = apply_limit(find_input(config.input), config.limit)
    folder, output = Path(source.store.uri), local_path(config.output)
    if any((folder / file.key).is_relative_to(output) for file in source.files):
        raise JobRefused(f"output {output} holds the input too; choose another folder")
    prices = load_prices(config.prices.path)
    if config.prices.accelerator is not None:
        prices.price(config.prices.accelerator)
    check_engine(config)
    return source


def prepare(config: BatchConfig) -> BatchJob:
    """Find and check everything that a job needs, and claim its output. Raises `JobRefused`."""
    source = find_checked(config)
    store = open_store(config.output)
    sampled = carried_kinds(row.carried for row in sample_rows(source, config.sampling))
    carried = begin(store, config, identity(config, source), sampled)
    prices = load_prices(config.prices.path)
    return BatchJob(config, source, prices, PartWriter(store, config.format, carried))


def check_engine(config: BatchConfig) -> None:
    """See that model and draft are there, where the engine will run on this machine. Raises `JobRefused`."""
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        return
    try:
        check_model(config.engine)
    except ConfigError as error:
        raise JobRefused(str(error)) from error


def read(pieces: list[Piece], reader: Reader) -> ray.data.Dataset:
    """The shards of some pieces as a dataset."""
    configure_data()
    source = ShardSource(pieces, reader)
    shards: ray.data.Dataset = ray.data.read_datasource(source, override_num_blocks=1, num_cpus=READ_CPUS)
    return shards


def generate(shards: ray.data.Dataset, job: BatchJob, factory: EngineFactory) -> ray.data.Dataset:
    """The receipts of shards that were generated, priced and written by a pool of actors."""
    actors, device = job.config.actors, job.config.engine.device
    gpus = num_gpus()
    use_gpu = device.startswith("cuda") or (device == "auto" and gpus > 0)
    gpus_each = job.config.engine.tensor_parallel_size
    room = gpus // gpus_each if use_gpu else int((num_cpus() - READ_CPUS) / ACTOR_CPUS)
    most = actors.max or max(actors.min, room if use_gpu else 1)
    # A running cluster may grow; one of our own cannot, and would wait for ever.
    if actors.min > room and not os.environ.get("RAY_ADDRESS"):
        raise JobRefused(
            f"actors.min = {actors.min}, but there is room for {room} on this machine's "
            f"{f'GPUs, {gpus_each} each' if use_gpu else 'CPU cores'} (engine.device is {device})"
        )
    spec = GenerateSpec(
        engine=job.config.engine,
        writer=job.writer,
        prices=job.prices,
        accelerator=job.config.prices.accelerator,
        job_seed=job.config.seed,
        actors=most,
        use_gpu=use_gpu,
    )
    pool = ActorPoolStrategy(
        min_size=actors.min, max_size=most, max_concurrent_calls_per_actor=actors.shards_in_flight
    )
    return shards.map(
        # Ray's annotation knows functions of a row; a class whose instances are called is documented too.
        Generate,  # type: ignore[arg-type]
        fn_constructor_args=(spec, factory),
        compute=pool,
        num_cpus=0 if use_gpu else ACTOR_CPUS,
        num_gpus=gpus_each if use_gpu else None,
    )


def follow(receipts: ray.data.Dataset) -> Iterator[Receipt]:
    """Receipts as they come. Raises what ended the job: `JobRefused` or `JobError`."""
    batches = receipts.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    try:
        for batch in batches:
            assert isinstance(batch, pa.Table) and batch.num_rows == 1
            receipt = receipt_from_record(batch.to_pylist()[0])
            if receipt.failure is not None:
                kind = JobRefused if receipt.exit_code == JobRefused.exit_code else JobError
                raise kind(receipt.failure)
            yield receipt
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        # Ray adds advice about its own settings in further lines.
        reason = str(cause).splitlines()[0] if str(cause) else "no reason given"
        raise JobError(
            reason if isinstance(cause, JobError) else f"{type(cause).__name__}: {reason}"
        ) from error
