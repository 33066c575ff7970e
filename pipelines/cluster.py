"""A Ray cluster for one job: the running one where RAY_ADDRESS names it, else one of our own."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

# Read by Ray when it is imported or starts. The C++ side writes to the driver's terminal.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")

import ray
from ray.data import DataContext

from pipelines.errors import JobRefused


@contextlib.contextmanager
def ray_cluster(*, running: bool = False) -> Iterator[None]:
    """Connect or start; what was started here is shut down again.

    With `running`, one that runs on this machine is joined where RAY_ADDRESS names none; raises `JobRefused`
    where there is none.
    """
    if ray.is_initialized():
        yield
        return
    with _silent_stderr():
        if running or os.environ.get("RAY_ADDRESS"):
            _join(None if os.environ.get("RAY_ADDRESS") else "auto")
        else:
            # Readers and an actor must fit beside each other, also on a machine with one core.
            cores = max(2, len(os.sched_getaffinity(0)))
            ray.init(
                address="local",
                num_cpus=cores,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str | None) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise JobRefused(
            "no Ray cluster runs on this machine; start the service (jobs/serve_online.py), or set "
            "RAY_ADDRESS to the cluster it runs in"
            if address
            else f"RAY_ADDRESS = {os.environ['RAY_ADDRESS']}: no Ray cluster lets this job in there (where "
            "one has a token, Ray wants RAY_AUTH_MODE=token)"
        ) from error


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Ray's C++ side says at its start which log level it was given, whatever that is."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def num_cpus() -> float:
    """CPUs of the whole cluster."""
    return float(ray.cluster_resources().get("CPU", 0))


def num_gpus() -> int:
    """GPUs of the whole cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def accelerators() -> set[str]:
    """Kinds of accelerators in the cluster, by Ray's names."""
    prefix = "accelerator_type:"
    return {name.removeprefix(prefix) for name in ray.cluster_resources() if name.startswith(prefix)}


def num_nodes() -> int:
    """Nodes of the cluster that are alive."""
    return sum(bool(node["Alive"]) for node in ray.nodes())


def configure_data() -> None:
    """Settings of Ray Data for datasets whose rows are shards."""
    context = DataContext.get_current()
    # One row a block: each shard leaves its reader, and each receipt its actor, as soon as it is ready,
    # and not when the whole read task ends. Rows are never split.
    context.target_max_block_size = 1
    # A shard of long answers may take longer than any fixed time.
    context.execution_no_progress_timeout_s = -1
    context.actor_init_retry_on_errors = True
    context.max_consecutive_actor_init_deaths = 3
    # The job shows its own progress and ends in one sentence; Ray's log files keep the rest.
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)
