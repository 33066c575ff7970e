"""A batch job from input to manifest: read, generate, price and write, sum up.

find_input -> lease -> begin -> plan -> [ read -> generate -> receipts ] -> manifest
                                          Ray Data, one row a shard
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

import ray

from dflash_engine.errors import ConfigError
from pipelines.admission_actor import open_admission
from pipelines.cluster import num_nodes, ray_cluster
from pipelines.config import BatchConfig
from pipelines.cost import PriceTable, load_prices
from pipelines.engines import EngineFactory, check_model, open_engine
from pipelines.errors import JobError, JobRefused
from pipelines.generate import GenerateSpec
from pipelines.inputs import Input, apply_limit, find_input
from pipelines.job import begin, check_identity, identity, read_job
from pipelines.lease import Lease, take_lease
from pipelines.manifest import clean_up, read_manifest, write_manifest
from pipelines.pool import generate, generate_by_service, most_actors, read, use_gpus
from pipelines.progress import JobProgress
from pipelines.read import Reader, sample_rows
from pipelines.receipts import below_error_rate, follow, while_leased
from pipelines.redo import Redo, holds_repairs, plan_redos, read_repairs
from pipelines.report import Summary
from pipelines.rows import TOKEN_IDS, carried_kinds
from pipelines.service_pool import service_pool
from pipelines.shards import Piece, cut_rule, left_to_do, plan
from pipelines.storage import LocalStore, Store, lies_under, open_store
from pipelines.write import PartWriter


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job that may start: everything found and checked."""

    config: BatchConfig
    source: Input
    prices: PriceTable
    writer: PartWriter


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to do of a job."""

    pieces: list[Piece]
    done: frozenset[str]
    """Shards that are passed over."""
    redos: Mapping[str, Redo]


def run_batch(config: BatchConfig, progress: TextIO, factory: EngineFactory = open_engine) -> Summary:
    """Do what is left of a job and sum it up; progress goes to `progress`, engines come from `factory`.

    Raises `JobRefused` where it cannot start as asked and `JobError` where it breaks off.
    """
    started = time.monotonic()
    store = open_store(config.output, config.storage)
    config = told_apart(config, store)
    source = find_checked(config)
    manifest = read_manifest(store)
    if manifest is not None and not config.retry_errors and not config.repairs:
        check_identity(store, identity(config, source))
        if not manifest.outdated(PartWriter(store, config.format, {})):
            return manifest.summary
    with take_lease(store, config.lease_s, progress) as lease:
        job = prepare(config, source, store)
        manifest = read_manifest(store)
        work = plan_work(job, complete=manifest is not None)
        if work.pieces:
            if work.done:
                print(f"{len(work.done):,} shards are already written; the rest is left to do", file=progress)
            run_shards(job, work, lease, progress, factory)
        lease.check()
        if manifest is None or work.pieces or not manifest.holds(job.writer):
            etag = None if manifest is None else manifest.etag
            summary = write_manifest(job.writer, config, job.prices, time.monotonic() - started, etag)
        else:
            summary = manifest.summary
        clean_up(job.writer)
        return summary


def told_apart(config: BatchConfig, store: Store) -> BatchConfig:
    """The config with its input as repairs, where that is error records of an output that is begun."""
    begun = read_job(store) if config.repairs is None else None
    if begun is None or not holds_repairs(find_input(config.input, config.storage)):
        return config
    return config.model_copy(update={"input": begun["config"]["input"], "repairs": config.input})


def plan_work(job: BatchJob, complete: bool) -> Work:
    """What is left to do: shards without a part, and those with rows that are done again."""
    parts = job.writer.parts()
    repairs = read_repairs(job.config.repairs, job.config.storage)
    redos = plan_redos(job.writer, parts, repairs, retry_errors=job.config.retry_errors)
    written = frozenset(part.shard_id for part in parts)
    done = written.difference(redos)
    if complete and not redos:
        return Work([], done, redos)
    return Work(left_to_do(plan(job.source, cut_rule(job.config)), done), done, redos)


def run_shards(job: BatchJob, work: Work, lease: Lease, progress: TextIO, factory: EngineFactory) -> None:
    """Read, generate and write what is left. Raises `JobError` where the job breaks off."""
    config = job.config
    reader = Reader(job.source.store, cut_rule(config), config.sampling, work.done)
    received: set[str] = set()
    total_bytes = sum(piece.input_bytes for piece in work.pieces)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ray_cluster(running=config.pool == "serve"))
        service = stack.enter_context(service_pool(config, job.writer.store, progress))
        bar = stack.enter_context(JobProgress(total_bytes, progress))
        warn_of_local_disks(job, progress)
        actors = most_actors(config) if service is None else service.engine.most_replicas
        admission = stack.enter_context(open_admission(job.writer, config.budget_usd))
        lease.when_lost(lambda reason: admission.refuse_from_driver(reason, JobError.exit_code))
        spec = GenerateSpec(
            engine=config.engine if service is None else service.engine.config,
            writer=job.writer,
            prices=job.prices,
            accelerator=config.prices.accelerator,
            job_seed=config.seed,
            defaults=config.sampling,
            actors=actors,
            use_gpu=use_gpus(config) if service is None else service.engine.use_gpu,
            tries=config.tries,
            admission=admission,
            redos=work.redos,
            dedupe=config.dedupe,
            output_token_ids=config.output_token_ids,
        )
        shards = read(work.pieces, reader)
        if service is None:
            generated = generate(shards, config, spec, factory)
        else:
            generated = generate_by_service(shards, spec, service)
        receipts = stack.enter_context(contextlib.closing(follow(generated)))
        for receipt in below_error_rate(while_leased(receipts, lease), config.max_error_rate):
            bar.add(receipt)
            received.add(receipt.shard_id)
    lost = received.difference(part.shard_id for part in job.writer.parts())
    if lost:
        raise JobError(
            f"{len(lost):,} parts that were written are not in output {job.writer.store.uri} (shard "
            f"{min(lost)}): do all nodes see the same disk there?"
        )


def warn_of_local_disks(job: BatchJob, progress: TextIO) -> None:
    """Say what is taken for granted where a path is used by several nodes."""
    if num_nodes() < 2:
        return
    for what, store in (("input", job.source.store), ("output", job.writer.store)):
        if isinstance(store, LocalStore):
            print(
                f"{what} {store.uri} is a path: all {num_nodes()} nodes must see the same disk there; "
                "where they do not, give an object store's URI",
                file=progress,
            )


def find_checked(config: BatchConfig) -> Input:
    """The input of a job whose prices and model are there too. Raises `JobRefused`."""
    source = apply_limit(find_input(config.input, config.storage), config.limit)
    folder = source.store.uri
    if any(lies_under(f"{folder}/{file.key}", config.output) for file in source.files):
        raise JobRefused(f"output {config.output} holds the input too; choose another folder")
    prices = load_prices(config.prices.path)
    if config.prices.accelerator is not None:
        prices.price(config.prices.accelerator)
    check_engine(config)
    return source


def prepare(config: BatchConfig, source: Input, store: Store) -> BatchJob:
    """Claim the output of a job for it. Raises `JobRefused`."""
    sampled = carried_kinds(row.carried for row in sample_rows(source, config.sampling))
    columns = {**sampled, **(TOKEN_IDS if config.output_token_ids else {})}
    carried = begin(store, config, identity(config, source), columns)
    return BatchJob(
        config, source, load_prices(config.prices.path), PartWriter(store, config.format, carried)
    )


def check_engine(config: BatchConfig) -> None:
    """See that model and draft are there, where the engine will run on this machine. Raises `JobRefused`."""
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        return
    try:
        check_model(config.engine)
    except ConfigError as error:
        raise JobRefused(str(error)) from error
