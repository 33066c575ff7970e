"""The pool of actors that shards go through: a Ray Data map from shards to receipts."""

from __future__ import annotations

import os

import ray.data
from ray.data import ActorPoolStrategy, TaskPoolStrategy

from pipelines.cluster import configure_data, num_cpus, num_gpus
from pipelines.config import BatchConfig
from pipelines.engines import EngineFactory
from pipelines.errors import JobRefused
from pipelines.generate import Generate, GenerateSpec
from pipelines.read import Reader, ShardSource
from pipelines.shards import Piece, read_tasks

ACTOR_CPUS = 1
# Readers ask for none: what a lost node had read must be read again where actors already hold every core, and
# they wait for it. Their number is bounded instead. (With the same resources as the actors', Ray Data would
# fuse reading into them, and their event loop would stand still while it parses.)
READ_CPUS = 0
READERS_A_CPU = 1
MIN_READERS = 2
# Kept free of actors where an own cluster is sized.
SPARE_CPUS = 0.25


def read(pieces: list[Piece], reader: Reader) -> ray.data.Dataset:
    """The shards of some pieces as a dataset."""
    configure_data()
    source = ShardSource(pieces, reader)
    most = max(MIN_READERS, int(num_cpus() * READERS_A_CPU))
    readers = min(most, len(read_tasks(pieces)))  # Ray warns where more could run than there are
    shards: ray.data.Dataset = ray.data.read_datasource(
        source, override_num_blocks=1, num_cpus=READ_CPUS, compute=TaskPoolStrategy(size=readers)
    )
    return shards


def use_gpus(config: BatchConfig) -> bool:
    """True where the engines of a job run on the GPUs of the cluster."""
    device = config.engine.device
    return device.startswith("cuda") or (device == "auto" and num_gpus() > 0)


def most_actors(config: BatchConfig) -> int:
    """The size that the pool may grow to. Raises `JobRefused` where its smallest size has no room."""
    actors, gpus_each = config.actors, config.engine.tensor_parallel_size
    on_gpus = use_gpus(config)
    room = num_gpus() // gpus_each if on_gpus else int((num_cpus() - SPARE_CPUS) / ACTOR_CPUS)
    # A running cluster may grow; one of our own cannot, and would wait for ever.
    if actors.min > room and not os.environ.get("RAY_ADDRESS"):
        where = f"GPUs, {gpus_each} each" if on_gpus else "CPU cores"
        raise JobRefused(
            f"actors.min = {actors.min}, but there is room for {room} on this machine's {where} "
            f"(engine.device is {config.engine.device})"
        )
    return actors.max or max(actors.min, room if on_gpus else 1)


def generate(
    shards: ray.data.Dataset, config: BatchConfig, spec: GenerateSpec, factory: EngineFactory
) -> ray.data.Dataset:
    """The receipts of shards that were generated, priced and written by a pool of actors."""
    pool = ActorPoolStrategy(
        min_size=config.actors.min,
        max_size=spec.actors,
        max_concurrent_calls_per_actor=config.actors.shards_in_flight,
    )
    return shards.map(
        # Ray's annotation knows functions of a row; a class whose instances are called is documented too.
        Generate,  # type: ignore[arg-type]
        fn_constructor_args=(spec, factory),
        compute=pool,
        num_cpus=0 if spec.use_gpu else ACTOR_CPUS,
        num_gpus=config.engine.tensor_parallel_size if spec.use_gpu else None,
    )
