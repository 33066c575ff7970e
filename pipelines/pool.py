"""The pool of actors that shards go through: a Ray Data map from shards to receipts."""

from __future__ import annotations

import os

import ray.data
from ray.data import ActorPoolStrategy, TaskPoolStrategy

from pipelines.cluster import configure_data, num_cpus, num_gpus
from pipelines.config import BatchConfig
from pipelines.courier import Courier
from pipelines.engines import EngineFactory
from pipelines.errors import JobRefused
from pipelines.generate import Generate, GenerateSpec
from pipelines.read import Reader, ShardSource
from pipelines.service_pool import ServicePool
from pipelines.shards import Piece, read_tasks
from pipelines.watchdog import Need, watch

ACTOR_CPUS = 1
# Readers ask for none: what a lost node had read must be read again where actors already hold every core, and
# they wait for it. Their number is bounded instead. (With the same resources as the actors', Ray Data would
# fuse reading into them, and their event loop would stand still while it parses.)
READ_CPUS = 0
# One for two cores: each costs some 3 s of imports, and gives rows faster than an actor takes them.
READERS_A_CPU = 0.5
MIN_READERS = 1
# A courier waits and computes nothing, but must not have the readers' resources: Ray Data would fuse reading
# into it, for the reason above.
COURIER_CPUS = 0
COURIER_BYTES = 1
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
    need = Need("GPU", config.engine.tensor_parallel_size) if spec.use_gpu else Need("CPU", ACTOR_CPUS)
    receipts = shards.map(
        # Ray's annotation knows functions of a row; a class whose instances are called is documented too.
        Generate,  # type: ignore[arg-type]
        fn_constructor_args=(spec, factory),
        compute=pool,
        num_cpus=0 if spec.use_gpu else need.amount,
        num_gpus=need.amount if spec.use_gpu else None,
    )
    return watch(receipts, need, config.lost_after_s)


def generate_by_service(
    shards: ray.data.Dataset, spec: GenerateSpec, service: ServicePool
) -> ray.data.Dataset:
    """The receipts of shards that the engines of a running service have done in their slack."""
    # Twice what they work on: a shard is there when they have room.
    at_once = max(MIN_READERS, 2 * service.engine.most_shards)
    arguments = (service.desk, service.name, service.run, service.engine.fingerprint, [ray.put(spec)])
    return shards.map(
        Courier,  # type: ignore[arg-type]  # as above
        fn_constructor_args=arguments,
        compute=ActorPoolStrategy(min_size=1, max_size=1, max_concurrent_calls_per_actor=at_once),
        num_cpus=COURIER_CPUS,
        memory=COURIER_BYTES,
    )
