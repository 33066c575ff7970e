"""A service from its start to its end: Ray joined or started, deployed, waited for, and drained."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException

from dflash_engine.errors import ConfigError
from pipelines.cluster import num_cpus, num_gpus, ray_cluster
from pipelines.desk_actor import open_desk
from pipelines.engines import check_model
from pipelines.errors import JobError, JobRefused
from pipelines.service.config import is_loopback
from pipelines.service.deployment import ENGINE_CPUS, application, listening_address, uses_gpu
from pipelines.service.serving_config import ServingConfig

_ANY_HOST = ("0.0.0.0", "::")


def serve_online(config: ServingConfig, progress: TextIO) -> float:
    """Serve until SIGTERM or SIGINT, then let the answers that run come to their end; how long it served, s.

    Raises `JobRefused` where it cannot start as asked and `JobError` where it does not come up.
    """
    # Read by Serve's controller where the cluster is ours: a replica that is not well has nothing to drain.
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    joins = ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))
    if not joins:
        _check_this_machine(config)
    with ray_cluster():
        if not joins:
            _check_room(config)
        started_serve = _start_serve(config)
        with _stop_signals() as stop:
            try:
                ingress = _deploy(config)
                began_s = time.monotonic()
                print(_how_to_try(config), file=progress, flush=True)
                stop.wait()
                print("no new requests; the answers that run are completed", file=progress, flush=True)
                _drain(config, ingress, progress)
                return time.monotonic() - began_s
            finally:
                # A cluster of our own goes as a whole.
                if joins:
                    _end(config, stop_serve=started_serve)


def _check_this_machine(config: ServingConfig) -> None:
    """All will run here: a wrong model and a port that is taken are found before anything starts."""
    try:
        check_model(config.engine)
    except ConfigError as error:
        raise JobRefused(str(error)) from error
    host, port = config.service.host, config.service.port
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise JobRefused(f"{host}:{port} cannot be listened on: {error.strerror or error}") from error


def _check_room(config: ServingConfig) -> None:
    """A running cluster may grow; one of our own cannot, and Serve would wait for ever."""
    gpus_each = config.engine.tensor_parallel_size
    on_gpus = uses_gpu(config.engine)
    room = num_gpus() // gpus_each if on_gpus else int(num_cpus() / ENGINE_CPUS)
    if config.replicas.min > room:
        where = f"GPUs, {gpus_each} each" if on_gpus else "CPU cores"
        raise JobRefused(
            f"replicas.min = {config.replicas.min}, but there is room for {room} on this machine's {where} "
            f"(engine.device is {config.engine.device})"
        )


def _start_serve(config: ServingConfig) -> bool:
    """Whether Serve was started here. Raises `JobRefused` where it listens elsewhere."""
    host, port = config.service.host, config.service.port
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if (running := _running_serve()) is not None:
        if running != (host, port):
            raise JobRefused(
                f"Serve already runs in this cluster and listens on {running[0]}:{running[1]}, not on "
                f"{host}:{port}: ask for that address, or end it first (serve shutdown)"
            )
        return False
    location = ProxyLocation.HeadOnly if is_loopback(host) else ProxyLocation.EveryNode
    serve.start(proxy_location=location, http_options=HTTPOptions(host=host, port=port))
    return True


def _running_serve() -> tuple[str, int] | None:
    try:
        return listening_address()
    except RayServeException:
        return None


def _deploy(config: ServingConfig) -> Any:
    try:
        return serve.run(application(config), name=config.name, route_prefix="/")
    except RuntimeError as error:
        raise JobError(f"the service did not come up: {_reason(config, error)}") from error


def _reason(config: ServingConfig, error: RuntimeError) -> str:
    """The sentence in what Serve knows of a failed deployment, which is a page of tracebacks."""
    with contextlib.suppress(RayError, RayServeException, KeyError):
        for deployment in serve.status().applications[config.name].deployments.values():
            lines = [line.strip() for line in deployment.message.splitlines()]
            told = [line for line in lines if "Error: " in line]
            if told:
                return told[-1].split("Error: ")[-1]
    return str(error).splitlines()[0]


def _drain(config: ServingConfig, ingress: Any, progress: TextIO) -> None:
    open_desk(config.name).drain()
    try:
        ingress.broadcast("drain").results(timeout_s=config.drain_s)
    except TimeoutError:
        print(f"answers still ran after drain_s = {config.drain_s:g} s, and are cut off", file=progress)


def _end(config: ServingConfig, *, stop_serve: bool) -> None:
    # What does not end in time is ended by Serve later, and was told of above.
    with contextlib.suppress(RayError, RayServeException, TimeoutError):
        serve.delete(config.name)
    if stop_serve:
        serve.shutdown()
    with contextlib.suppress(RayError):
        open_desk(config.name).end()


def _how_to_try(config: ServingConfig) -> str:
    host = "127.0.0.1" if config.service.host in _ANY_HOST else config.service.host
    url = f"http://{host}:{config.service.port}"
    name = config.service.model_name or config.engine.model
    key = "" if config.service.keys is None else " -H 'Authorization: Bearer KEY'"
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"serving {name} at {url} (OpenAI: {url}/v1, Anthropic: {url})\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n"
        f"  batch jobs in its slack: {_cluster()} python jobs/batch_generate.py --set pool=serve …\n"
        "Ctrl-C or SIGTERM ends it once the answers that run are made"
    )


def _cluster() -> str:
    """What a program that joins this cluster has in its environment."""
    # Ray sets the mode of clusters that it starts, and does not find it out for those that it joins.
    token = os.environ.get("RAY_AUTH_MODE") == "token"
    address = f"RAY_ADDRESS={ray.get_runtime_context().gcs_address}"
    return f"RAY_AUTH_MODE=token {address}" if token else address


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Set by the first SIGTERM or SIGINT; a second one interrupts."""
    stop = threading.Event()

    def told(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
