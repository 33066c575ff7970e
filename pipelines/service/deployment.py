"""The service as a Ray Serve application: HTTP ingress, and engines behind a handle.

    serve run pipelines.service.deployment:build config=configs/serve/local.yaml
    serve deploy configs/serve/serve-config.yaml

A deployment of the same code is a rolling one: streams that run go on in the replicas that they began in.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from typing import Any

import orjson
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig
from ray.serve.context import _get_global_client

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError
from pipelines.cluster import accelerators, num_gpus
from pipelines.desk_actor import DeskPort, open_desk
from pipelines.errors import JobError
from pipelines.service.access_log import log_to_stderr
from pipelines.service.app import create_app
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_price import engine_price
from pipelines.service.engine_replica import EngineReplica, with_threads
from pipelines.service.local import served_model
from pipelines.service.own_request_id import WithoutRequestId
from pipelines.service.remote_engine import RemoteEngine
from pipelines.service.serving_config import ServingConfig, checked, load_serving
from pipelines.service.usage_ledger import UsageLedger
from pipelines.shard_desk import ServedEngine
from pipelines.storage import open_store

ENGINE = "Engine"
INGRESS = "Ingress"
ENGINE_CPUS = 1
# Beside the answers an ingress refuses some, tells its health and counts tokens.
SPARE_CALLS = 1000
# An engine that does not start is tried so often before the deployment counts as failed.
STARTS = 3

logger = logging.getLogger(__name__)


class Ingress:
    """The HTTP side as a replica. Raises `ConfigError` where Serve listens for strangers without keys."""

    async def __init__(self, config: ServingConfig, engines: Any) -> None:  # type: ignore[misc]
        self._ledger: UsageLedger | None = None
        service = listening_on(config.service, listening_address()[0])
        served: ServedEngine = await engines.served.remote()
        model = await asyncio.to_thread(served_model, config.engine, service)
        self._ledger = _ledger(config, model.name)
        engine = RemoteEngine(engines, served.fingerprint, service.retry_after_s)
        if service.access_log:
            log_to_stderr()
        self._own_app = create_app(
            engine,
            model,
            service,
            on_usage=self._ledger,
            engine_stats=engine.replica_stats,
            price=engine_price(
                service,
                use_gpu=served.use_gpu,
                num_gpus=config.engine.tensor_parallel_size,
                accelerators=accelerators(),
            ),
        )
        self._service = self._own_app.state.service

    def __serve_build_asgi_app__(self) -> WithoutRequestId:
        return WithoutRequestId(self._own_app)

    async def drain(self) -> None:
        """New requests get 503; returns when the answers that run are made, and their usage is written."""
        self._service.drain()
        await self._service.idle()
        await self._flush()

    async def __del__(self) -> None:
        """Called by Serve when the requests that run have ended."""
        await self._flush()

    async def _flush(self) -> None:
        if self._ledger is not None:
            try:
                await asyncio.to_thread(self._ledger.flush)
            except JobError:
                logger.exception("usage records are lost unless the ledger comes back")


class EngineDeployment(EngineReplica):
    """`EngineReplica` with what Ray knows of where it runs."""

    def __init__(self, config: ServingConfig, use_gpu: bool, most_replicas: int) -> None:
        engine = config.engine if use_gpu else with_threads(config.engine, most_replicas)

        def served(fingerprint: str) -> ServedEngine:
            shards = config.replicas.shards_in_flight
            return ServedEngine(config.engine, fingerprint, use_gpu, most_replicas, shards)

        super().__init__(
            config.model_copy(update={"engine": engine}),
            served,
            ray.get_runtime_context().get_actor_id() or "",
            functools.partial(_open_desk, config.name),
        )

    async def __del__(self) -> None:
        """Called by Serve when the requests that run have ended."""
        await self.close()


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of `config`, a YAML file, and of `dotted.key` settings beside it. Raises `ConfigError`.

    What stands under `service.host` and `service.port` holds for `jobs/serve_online.py`; here Serve's own
    `http_options` say where it listens.
    """
    settings = dict(args)
    path = settings.pop("config", None)
    if path is None:
        return application(checked(settings, "the application's args"))
    return application(load_serving(str(path), [f"{key}={_text(value)}" for key, value in settings.items()]))


def application(config: ServingConfig) -> serve.Application:
    """The application of a config, sized for the cluster that it is built in."""
    use_gpu = uses_gpu(config.engine)
    most = most_replicas(config, use_gpu)
    engines = _deployment(EngineDeployment, ENGINE).options(**_engine_options(config, use_gpu, most))
    ingress = _deployment(serve.ingress()(Ingress), INGRESS).options(
        num_replicas=config.ingresses,
        max_ongoing_requests=config.service.max_requests + SPARE_CALLS,
        ray_actor_options={"num_cpus": 0},
        **_shared_options(config),
    )
    app: serve.Application = ingress.bind(config, engines.bind(config, use_gpu, most))
    return app


def uses_gpu(engine: EngineConfig) -> bool:
    """True where engines run on the GPUs of the cluster."""
    return engine.device.startswith("cuda") or (engine.device == "auto" and num_gpus() > 0)


def most_replicas(config: ServingConfig, use_gpu: bool) -> int:
    """How many engines there may be."""
    replicas = config.replicas
    room = num_gpus() // config.engine.tensor_parallel_size if use_gpu else 1
    return replicas.max or max(replicas.min, room)


def listening_on(config: ServiceConfig, host: str) -> ServiceConfig:
    """The config with the host where Serve listens, whatever it said itself.

    Raises `ConfigError` where others than this machine reach that, and nothing was said of keys.
    """
    said = {name: getattr(config, name) for name in ServiceConfig.model_fields}
    try:
        return ServiceConfig.model_validate({**said, "host": host})
    except ValueError as error:
        raise ConfigError(
            f"Serve listens on {host}, which other machines can reach: set service.keys to a file of keys, "
            "or service.allow_anonymous to serve everybody"
        ) from error


def listening_address() -> tuple[str, int]:
    """Where Serve's proxies listen in this cluster. Raises `RayServeException` where Serve does not run."""
    client = _get_global_client()
    assert client is not None
    return client.http_config.host or "127.0.0.1", client.http_config.port


def _deployment(kind: type, name: str) -> Any:
    """Ray's annotation says that it is a decorator."""
    return serve.deployment(kind, name=name)


def _engine_options(config: ServingConfig, use_gpu: bool, most: int) -> dict[str, Any]:
    replicas = config.replicas
    gpus = config.engine.tensor_parallel_size if use_gpu else 0
    at_once = config.engine.limit("max_num_seqs", "cuda" if use_gpu else "cpu")
    scaling = AutoscalingConfig(
        min_replicas=replicas.min,
        max_replicas=most,
        target_ongoing_requests=replicas.target_requests or at_once,
        upscale_delay_s=replicas.upscale_delay_s,
        downscale_delay_s=replicas.downscale_delay_s,
    )
    return {
        "autoscaling_config": scaling,
        "max_ongoing_requests": replicas.max_requests or 2 * at_once,
        "max_queued_requests": replicas.max_queued,
        "ray_actor_options": {"num_cpus": 0 if use_gpu else ENGINE_CPUS, "num_gpus": gpus},
        **_shared_options(config),
    }


def _shared_options(config: ServingConfig) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": config.drain_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": config.health.period_s,
        "health_check_timeout_s": config.health.timeout_s,
        "max_constructor_retry_count": STARTS,
    }


def _ledger(config: ServingConfig, model: str) -> UsageLedger | None:
    if config.ledger is None:
        return None
    return UsageLedger(open_store(config.ledger, config.storage), model, config.ledger_flush_s)


def _open_desk(service: str) -> DeskPort:
    return open_desk(service)


def _text(value: object) -> str:
    """As `--set` takes it: what comes from a command line is text already."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()
