"""The engines of a running service as the pool of a batch job: found, compared, refused where they differ."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import ray

from dflash_engine.config import EngineConfig
from pipelines.config import BatchConfig
from pipelines.desk_actor import RemoteDesk, find_desks
from pipelines.errors import JobRefused
from pipelines.job import DECIDING_ENGINE, read_fingerprint
from pipelines.shard_desk import ServedEngine
from pipelines.storage import Store

# Those of `identity`, and the one that is a fingerprint's matter, which a job only knows with an engine.
_COMPARED = (*DECIDING_ENGINE, "exact")


@dataclass(frozen=True, slots=True)
class ServicePool:
    """A service that does the shards of one run of a job."""

    desk: RemoteDesk
    engine: ServedEngine
    run: str

    @property
    def name(self) -> str:
        return self.desk.service


@contextlib.contextmanager
def service_pool(config: BatchConfig, store: Store, progress: TextIO) -> Iterator[ServicePool | None]:
    """The service that a job uses, told when the run ends; None where the job has engines of its own.

    Raises `JobRefused` where `pool: serve` finds none, or none that answers as the job asks, and where the
    engines of its own would wait for GPUs that a service holds.
    """
    if config.pool == "own":
        yield None
        return
    found = [(desk, engine) for desk, view in find_desks() for engine in view.engines]
    reasons: list[str] = []
    for desk, engine in found:
        reason = difference(config, engine, desk.service, store)
        if reason is None:
            print(f"the engines of service {desk.service} do the rows as they have slack", file=progress)
            pool = ServicePool(desk, engine, uuid.uuid4().hex)
            try:
                yield pool
            finally:
                desk.close_run(pool.run)
            return
        reasons.append(reason)
    if config.pool == "serve":
        none = (
            f"no service runs in the cluster at {ray.get_runtime_context().gcs_address}; start one "
            "(jobs/serve_online.py), name its cluster by RAY_ADDRESS, or say pool = own"
        )
        raise JobRefused(f"pool = serve: {'; '.join(dict.fromkeys(reasons)) or none}")
    _check_free_gpus(config, reasons, any(engine.use_gpu for _, engine in found))
    yield None


def difference(config: BatchConfig, served: ServedEngine, service: str, store: Store) -> str | None:
    """Why the engines of a service do not answer as a job asks; None where they do."""
    for name in _COMPARED:
        asked, has = getattr(config.engine, name), getattr(served.config, name)
        if asked != has:
            return f"service {service} has engine.{name} = {_shown(has)}, this job asks for {_shown(asked)}"
    begun = read_fingerprint(store)
    if begun is not None and begun != served.fingerprint:
        return (
            f"service {service} has an engine with fingerprint {served.fingerprint}, and output {store.uri} "
            f"was begun by one with {begun} (weights, precision, device and versions make it)"
        )
    if served.most_shards < 1:
        return f"service {service} takes no batch shards (replicas.shards_in_flight = 0)"
    return None


def _check_free_gpus(config: BatchConfig, reasons: list[str], held: bool) -> None:
    """Engines of its own would wait for ever where a service holds the GPUs that they need."""
    if not held or not _wants_gpu(config.engine):
        return
    needed = config.actors.min * config.engine.tensor_parallel_size
    free = int(ray.available_resources().get("GPU", 0))
    if free < needed:
        raise JobRefused(
            f"{'; '.join(dict.fromkeys(reasons))}; and {free} of the cluster's GPUs are free, where engines "
            f"of its own need {needed}: ask for what the service has, or end it"
        )


def _wants_gpu(engine: EngineConfig) -> bool:
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    return engine.device.startswith("cuda") or (engine.device == "auto" and has_gpus)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
