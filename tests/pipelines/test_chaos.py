"""Nothing lost, nothing twice: processes killed and puts failed at seeded moments, and the job run again."""

from __future__ import annotations

import io
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import ray

from dflash_engine.config import EngineConfig
from dflash_engine.fake import FakeEngine
from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from pipelines.errors import JobError, JobRefused
from pipelines.storage import LocalStore
from tests.pipelines.chaos import (
    Chaos,
    Fault,
    PoisonedEngine,
    among_faults,
    chaos_factory,
)
from tests.pipelines.chaos_driver import start_driver
from tests.pipelines.helpers import error_records, jsonl, output_rows, prompts

# Ray Data warns of its own deprecated settings when it sets their defaults.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data")]

ROWS = 48
SHARD_ROWS = 6
# Several of the input's end, where shards are small, are among them.
PARTS = 12
SEEDS = [*range(30), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(30, 130))]
KEPT = (
    "custom_id",
    "status",
    "text",
    "finish_reason",
    "completion_tokens",
    "cost_usd",
    "error_type",
    "extra",
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """One cluster for all runs: its address."""
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The input: some rows are bad, so that there are error files too."""
    rows: list[Any] = [{**row, "temperature": 1.0} for row in prompts(ROWS)]
    rows[7] = {"prompt": 7, "custom_id": "c7"}
    rows[30] = {"prompt": "word " * 60, "custom_id": "c30"}
    file = tmp_path_factory.mktemp("input") / "in.jsonl"
    file.write_bytes(jsonl(rows))
    return file


def job(source: Path, output: Path, **settings: Any) -> BatchConfig:
    values: dict[str, Any] = {
        "engine": {"model": "fake", "max_model_len": 40, "max_num_seqs": 4},
        "sampling": {"max_tokens": 12},
        "shard": {"rows": SHARD_ROWS},
        "actors": {"max": 1, "shards_in_flight": 2},
        "lease_s": 5.0,
    }
    return BatchConfig(input=str(source), output=str(output), **{**values, **settings})


def answers(output: Path) -> dict[str, tuple[Any, ...]]:
    """What stands in an output, each row once."""
    rows = output_rows(output)
    found = {row["row_id"]: tuple(row[name] for name in KEPT) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """What the job's output is where nothing happens."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    assert run_batch(job(source, output), io.StringIO()).totals.rows == ROWS
    return answers(output)


def faults_of(seed: int) -> tuple[Fault, ...]:
    """One to three faults; which of them strike first, the job decides."""
    generator = random.Random(seed)
    return tuple(_fault(generator) for _ in range(generator.choice([1, 1, 2, 3])))


def _fault(generator: random.Random) -> Fault:
    event = generator.choice(["row", "row", "put", "written", "written", "read", "manifest"])
    most = {"row": ROWS - 2, "put": PARTS + 2, "written": PARTS + 2, "read": 4, "manifest": 1}[event]
    victims = {"written": ["self", "put", "admission"], "read": ["self"], "manifest": ["put"]}
    victim = generator.choice(victims.get(event, ["self", "self", "admission"]))
    return Fault(victim, event, generator.randint(1, most))


def run_among_faults(config: BatchConfig, chaos: Chaos, patch: pytest.MonkeyPatch) -> int:
    """Run a job until it is done, the same command again and again; how many runs it took."""
    with patch.context() as patched:
        among_faults(config, chaos, patched)
        for runs in range(1, len(chaos.faults) + 2):
            try:
                run_batch(config, io.StringIO(), chaos_factory(chaos))
            except JobError as error:
                assert "was lost" in str(error), error
            else:
                return runs
    raise AssertionError("a fault strikes once, so a job ends at the latest after all of them")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_among_faults_gives_what_an_undisturbed_one_gives(
    seed: int,
    source: Path,
    undisturbed: dict[str, tuple[Any, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    chaos = Chaos(tmp_path, faults_of(seed))
    actors = {"max": 2 if seed % 3 == 0 else 1, "shards_in_flight": 2}
    run_among_faults(job(source, tmp_path / "out", actors=actors), chaos, monkeypatch)
    assert answers(tmp_path / "out") == undisturbed
    assert sorted(record["custom_id"] for record in error_records(tmp_path / "out")) == ["c30", "c7"]
    assert not list(LocalStore(tmp_path / "out").keys("_attempts/"))


@pytest.mark.parametrize(
    "fault", [Fault("driver", "row", 20), Fault("driver", "put", 1), Fault("driver", "written", 9)]
)
def test_a_killed_driver_is_followed_by_the_next_run(
    fault: Fault,
    cluster: str,
    source: Path,
    undisturbed: dict[str, tuple[Any, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    chaos = Chaos(tmp_path, (fault,))
    config = job(source, tmp_path / "out")
    driver = start_driver(config, chaos, cluster)
    _, log = driver.communicate()
    assert driver.returncode == -signal.SIGKILL, log
    assert not (tmp_path / "out" / "_manifest.json").exists()
    run_among_faults(config, chaos, monkeypatch)
    assert answers(tmp_path / "out") == undisturbed


def test_of_two_drivers_the_second_is_refused_until_the_first_goes_silent_and_then_takes_over(
    cluster: str, source: Path, undisturbed: dict[str, tuple[Any, ...]], tmp_path: Path
):
    engine = {"model": "fake:0.05", "max_model_len": 40, "max_num_seqs": 2}
    config = job(source, tmp_path / "out", engine=engine, lease_s=3.0)
    chaos = Chaos(tmp_path, ())
    first = start_driver(config, chaos, cluster)
    while not (tmp_path / "written-1").exists():
        assert first.poll() is None, first.communicate()
    with pytest.raises(JobRefused, match="is being written by another driver") as caught:
        run_batch(config, io.StringIO())
    assert f"(process {first.pid} on " in str(caught.value)
    chaos.silence_leases()
    refused = 0
    while True:
        try:
            run_batch(config, io.StringIO())
        except JobRefused as error:
            assert "is being written by another driver" in str(error)
            refused += 1
        else:
            break
    assert refused
    _, log = first.communicate()
    assert first.returncode == 1
    assert "is lost: it could not be renewed for 3 s" in log or "another driver has taken it over" in log
    assert answers(tmp_path / "out") == undisturbed


def test_a_row_that_kills_its_process_is_isolated_and_reported_and_all_others_are_done(
    source: Path, undisturbed: dict[str, tuple[Any, ...]], tmp_path: Path
):
    lines = source.read_bytes().splitlines(keepends=True)
    # As long as the line that it replaces, so that all others keep their places.
    lines[20] = orjson.dumps({"prompt": "poison", "custom_id": "bad"}).ljust(len(lines[20]) - 1) + b"\n"
    (tmp_path / source.name).write_bytes(b"".join(lines))
    config = job(tmp_path / source.name, tmp_path / "out")
    summary = run_batch(config, io.StringIO(), PoisonedEngine)
    assert (summary.totals.rows_ok, summary.totals.rows_error) == (ROWS - 3, 3)
    found = answers(tmp_path / "out")
    (row_id,) = (row_id for row_id, values in found.items() if values[0] == "bad")
    records = {record["custom_id"]: record for record in error_records(tmp_path / "out")}
    assert records["bad"]["error_type"] == "engine_crash"
    assert records["bad"]["row_id"] == row_id
    del found[row_id]
    assert found == {key: values for key, values in undisturbed.items() if key != row_id}


def test_an_engine_that_kills_its_process_while_loading_ends_the_job(source: Path, tmp_path: Path):
    def load(config: EngineConfig) -> FakeEngine:
        os.write(2, b"no kernel image is available\n")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    config = job(source, tmp_path / "out", tries={"start": 2})
    with pytest.raises(JobError, match=r"did not start in 2 tries: process \d+ died while .*no kernel image"):
        run_batch(config, io.StringIO(), load)


@pytest.fixture(scope="module")
def real(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a job with the real engine, and its output where nothing happens."""
    settings = {
        "engine": {"model": "smollm2-135m", "max_num_seqs": 8},
        "sampling": {"max_tokens": 12, "temperature": 1.0},
        "shard": {"rows": 4},
        "limit": 20,
    }
    output = tmp_path_factory.mktemp("real") / "out"
    run_batch(job(source, output, **settings), io.StringIO())
    return settings, timeless(answers(output))


def timeless(found: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Without what the time that an engine was busy costs: it is measured, and never the same twice."""
    cost = KEPT.index("cost_usd")
    return {row_id: values[:cost] + values[cost + 1 :] for row_id, values in found.items()}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_the_real_engine_gives_the_same_tokens_after_its_death_and_its_driver_s(
    seed: int,
    cluster: str,
    source: Path,
    real: tuple[dict[str, Any], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    settings, wanted = real
    generator = random.Random(seed)
    # 20 rows, one of them bad, in at least five parts: the first run has all of these before it.
    first, second = generator.sample(["self", "driver"], 2)
    early, late = generator.randint(1, 6), generator.randint(9, 14)
    chaos = Chaos(tmp_path, (Fault(first, "row", early), Fault(second, "row", late)))
    config = job(source, tmp_path / "out", **settings)
    driver = start_driver(config, chaos, cluster)
    _, log = driver.communicate()
    assert driver.returncode == -signal.SIGKILL, log
    run_among_faults(config, chaos, monkeypatch)
    assert (tmp_path / f"row-{late}").exists()
    assert timeless(answers(tmp_path / "out")) == wanted
