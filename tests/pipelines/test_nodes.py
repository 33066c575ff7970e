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

from dflash_engine.config import EngineConfig
from pipelines.batch import run_batch
from pipelines.config import BatchConfig, ShardConfig
from tests.pipelines.chaos import Chaos, Fault, among_faults, chaos_factory
from tests.pipelines.chaos_driver import start_driver
from tests.pipelines.helpers import jsonl, output_rows, prompts, read_shards
from tests.pipelines.test_generate import generated, spec

# Ray Data warns of its own deprecated settings when it sets their defaults.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data")]

ROWS = 90
KEPT = ("custom_id", "status", "text", "finish_reason", "completion_tokens")


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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([{**row, "temperature": 1.0, "max_tokens": 12} for row in prompts(ROWS)]))
    return file


def job(source: Path, output: Path) -> BatchConfig:
    return BatchConfig(
        input=str(source),
        output=str(output),
        engine={"model": "fake:0.02", "max_num_seqs": 4},
        shard={"rows": 8},
        actors={"min": 2, "max": 2, "shards_in_flight": 2},
    )


def answers(output: Path) -> dict[str, tuple[Any, ...]]:
    rows = output_rows(output)
    found = {row["row_id"]: tuple(row[name] for name in KEPT) for row in rows}
    assert len(found) == len(rows) == ROWS
    return found


@pytest.fixture
def wanted(source: Path, tmp_path: Path) -> dict[str, tuple[Any, ...]]:
    """The rows of a job that nothing happens to, without any cluster."""
    output = tmp_path / "wanted"
    shards = [shard.as_table().to_pylist()[0] for shard in read_shards(source, ShardConfig(rows=8))]
    generated(spec(output, engine=EngineConfig(model="fake")), shards)
    return answers(output)


def test_a_node_with_an_engine_goes_away_and_every_row_is_there_once(
    source: Path, wanted: dict[str, tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chaos = Chaos(tmp_path, (Fault("node", "row", 30),))
    config = job(source, tmp_path / "out")
    log = io.StringIO()
    with nodes() as cluster, monkeypatch.context() as patch:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        chaos.here_is("node", next(iter(cluster.worker_nodes)).all_processes["raylet"][0].process.pid)
        among_faults(config, chaos, patch)
        run_batch(config, log, chaos_factory(chaos))
    assert not (tmp_path / "node.pid").exists(), "it was not struck"
    assert answers(tmp_path / "out") == wanted
    assert "is a path: all 3 nodes must see the same disk there" in log.getvalue()


def test_the_driver_s_node_goes_away_with_the_head_and_another_cluster_goes_on(
    source: Path, wanted: dict[str, tuple[Any, ...]], tmp_path: Path
):
    chaos = Chaos(tmp_path, (Fault("driver", "row", 30),))
    config = job(source, tmp_path / "out")
    with nodes() as cluster:
        driver = start_driver(config, chaos, cluster.address)
        _, log = driver.communicate()
        assert driver.returncode == -signal.SIGKILL, log
        cluster.remove_node(cluster.head_node, allow_graceful=False)
    assert not (tmp_path / "out" / "_manifest.json").exists()
    with nodes() as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        run_batch(config, io.StringIO())
    assert answers(tmp_path / "out") == wanted
