"""A job on a cluster of three Ray nodes, of which whole ones go away."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from tests.pipelines.chaos import Chaos, Fault, among_faults, chaos_factory
from tests.pipelines.chaos_driver import start_driver
from tests.pipelines.helpers import jsonl, output_rows, prompts

# Ray Data warns of its own deprecated settings when it sets their defaults.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data")]

ROWS = 90
KEPT = ("custom_id", "status", "text", "finish_reason", "completion_tokens", "cost_usd")


@contextlib.contextmanager
def nodes() -> Iterator[Cluster]:
    """Three nodes; the first one is the head, which has no room for an actor."""
    # A node that says nothing for two seconds is dead.
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
    settings = {**health, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 4}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": settings}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def connect(cluster: Cluster) -> None:
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)


def job(tmp_path: Path, output: str, **settings: Any) -> BatchConfig:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([{**row, "temperature": 1.0} for row in prompts(ROWS)]))
    values: dict[str, Any] = {
        "engine": {"model": "fake:0.02", "max_num_seqs": 4},
        "sampling": {"max_tokens": 12},
        "shard": {"rows": 8},
        "actors": {"min": 2, "max": 2, "shards_in_flight": 2},
    }
    return BatchConfig(input=str(source), output=str(tmp_path / output), **{**values, **settings})


def answers(output: Path) -> dict[str, tuple[Any, ...]]:
    rows = output_rows(output)
    found = {row["row_id"]: tuple(row[name] for name in KEPT) for row in rows}
    assert len(found) == len(rows) == ROWS
    return found


def test_whole_nodes_go_away_the_driver_s_own_included_and_every_row_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with nodes() as cluster:
        connect(cluster)
        log = io.StringIO()
        run_batch(job(tmp_path, "undisturbed"), log)
        wanted = answers(tmp_path / "undisturbed")
        assert "is a path: all 3 nodes must see the same disk there" in log.getvalue()

        # A node with an engine on it, in the middle of the work.
        folder = tmp_path / "one"
        folder.mkdir()
        chaos = Chaos(folder, (Fault("node", "row", 30),))
        chaos.here_is("node", next(iter(cluster.worker_nodes)).all_processes["raylet"][0].process.pid)
        config = job(tmp_path, "one/out")
        with monkeypatch.context() as patch:
            among_faults(config, chaos, patch)
            run_batch(config, io.StringIO(), chaos_factory(chaos))
        assert answers(folder / "out") == wanted
        assert not (folder / "node.pid").exists()
        ray.shutdown()

    # The node of the driver, and with it the cluster's head.
    folder = tmp_path / "head"
    folder.mkdir()
    chaos = Chaos(folder, (Fault("driver", "row", 30),))
    config = job(tmp_path, "head/out")
    with nodes() as cluster:
        driver = start_driver(config, chaos, cluster.address)
        _, log_text = driver.communicate()
        assert driver.returncode == -signal.SIGKILL, log_text
        cluster.remove_node(cluster.head_node, allow_graceful=False)
    assert not (folder / "out" / "_manifest.json").exists()
    with nodes() as cluster:
        connect(cluster)
        run_batch(config, io.StringIO())
    assert answers(folder / "out") == wanted
