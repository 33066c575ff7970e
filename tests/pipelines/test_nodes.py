"""A job on a cluster of three Ray nodes, of which whole ones go away."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from dflash_engine.config import EngineConfig
from pipelines.batch import run_batch
from pipelines.config import BatchConfig, ShardConfig
from pipelines.errors import JobError
from tests.pipelines.chaos import Chaos, Fault, among_faults, chaos_factory
from tests.pipelines.chaos_driver import start_driver
from tests.pipelines.helpers import jsonl, output_rows, prompts, read_shards
from tests.pipelines.test_generate import generated, spec

# Ray Data warns of its own deprecated settings when it sets their defaults.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data")]

ROWS = 90
KEPT = ("custom_id", "status", "text", "finish_reason", "completion_tokens")


@contextlib.contextmanager
def nodes(*num_cpus: int) -> Iterator[Cluster]:
    """A head, which has no room for an actor, and two nodes with so many CPUs."""
    # A node that says nothing for two seconds is dead.
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
    settings = {**health, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 4}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": settings}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for cpus in num_cpus:
            cluster.add_node(num_cpus=cpus)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([{**row, "temperature": 1.0, "max_tokens": 12} for row in prompts(ROWS)]))
    return file


def job(source: Path, output: Path, actors: int = 2, lost_after_s: float = 120) -> BatchConfig:
    return BatchConfig(
        input=str(source),
        output=str(output),
        engine={"model": "fake:0.02", "max_num_seqs": 4},
        shard={"rows": 8},
        actors={"min": actors, "max": actors, "shards_in_flight": 2},
        lost_after_s=lost_after_s,
    )


def raylet(node: Any) -> subprocess.Popen[bytes]:
    """The process that a node lives by."""
    process: subprocess.Popen[bytes] = node.all_processes["raylet"][0].process
    return process


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
    with nodes(2, 2) as cluster, monkeypatch.context() as patch:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        chaos.here_is("node", raylet(next(iter(cluster.worker_nodes))).pid)
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
    with nodes(2, 2) as cluster:
        driver = start_driver(config, chaos, cluster.address)
        _, log = driver.communicate()
        assert driver.returncode == -signal.SIGKILL, log
        cluster.remove_node(cluster.head_node, allow_graceful=False)
    assert not (tmp_path / "out" / "_manifest.json").exists()
    with nodes(2, 2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        run_batch(config, io.StringIO())
    assert answers(tmp_path / "out") == wanted


def test_the_last_node_with_room_is_waited_for_in_vain_and_the_next_one_is_replaced_in_time(
    source: Path, wanted: dict[str, tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parts = tmp_path / "out" / "data"
    with nodes(2, 0) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)

        def run(node: Any, name: str, lost_after_s: float) -> None:
            """Run the job among faults: the node goes away in the middle."""
            (tmp_path / name).mkdir()
            chaos = Chaos(tmp_path / name, (Fault("node", "row", 30),))
            chaos.here_is("node", raylet(node).pid)
            config = job(source, tmp_path / "out", actors=1, lost_after_s=lost_after_s)
            try:
                with monkeypatch.context() as patch:
                    among_faults(config, chaos, patch)
                    run_batch(config, io.StringIO(), chaos_factory(chaos))
            finally:
                assert not (tmp_path / name / "node.pid").exists(), "it was not struck"

        first, _ = sorted(cluster.worker_nodes, key=lambda node: -node._ray_params.num_cpus)
        with pytest.raises(
            JobError, match=r"no engine .* for 20 s .* each asks for 1 .*CPU cores.* has 0 on 2"
        ):
            run(first, "in-vain", 20)
        kept = {part.name: part.stat().st_mtime_ns for part in parts.iterdir()}
        assert kept
        second = cluster.add_node(num_cpus=2)
        # Ray starts nodes in the main thread only.
        with ThreadPoolExecutor() as pool:
            running = pool.submit(run, second, "in-time", 120)
            raylet(second).wait()
            cluster.add_node(num_cpus=2)
            running.result()
    assert answers(tmp_path / "out") == wanted
    assert kept.items() <= {part.name: part.stat().st_mtime_ns for part in parts.iterdir()}.items()
