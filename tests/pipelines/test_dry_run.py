"""What is known of a job before it starts, on a real Ray cluster with the fake engine."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from pipelines.dry_run import dry_run
from pipelines.errors import JobRefused
from tests.pipelines.helpers import jsonl, prompts

# Ray Data warns of its own deprecated settings when it sets their defaults.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data")]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    yield
    ray.shutdown()


def job(tmp_path: Path, **settings: object) -> BatchConfig:
    values = {
        "input": str(tmp_path / "in"), "output": str(tmp_path / "out"), "shard": {"rows": 10},
        "engine": {"model": "fake"}, "sampling": {"max_tokens": 12},
    }  # fmt: skip
    return BatchConfig(**(values | settings))


def test_all_rows_are_checked_and_counted_and_nothing_is_written(tmp_path: Path) -> None:
    long = {"prompt": "word " * 5000}
    (tmp_path / "in").write_bytes(jsonl([*prompts(40), {"prompt": 3}, [1], long, long]))
    found = dry_run(job(tmp_path), 0, io.StringIO())
    assert found.rows_ok == 40 and found.sample == [] and found.price is None
    assert found.errors == Counter(invalid_prompt=1, invalid_row=1, context_length_exceeded=2)
    assert not (tmp_path / "out").exists()


def test_a_sample_of_all_rows_says_what_the_job_then_takes(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(jsonl([*prompts(30), {"prompt": 3}]))
    line = dry_run(job(tmp_path), 100, io.StringIO()).as_json()
    summary = run_batch(job(tmp_path), io.StringIO()).as_json()
    for name in ("rows_ok", "rows_error", "prompt_tokens"):
        assert line[name] == summary[name]
    for name in ("completion_tokens", "gpu_seconds", "cost_usd"):
        # Each row's cost is rounded to 1e-12 dollars.
        assert line[name] == pytest.approx([summary[name]] * 3, rel=1e-4)


def test_a_smaller_sample_gives_a_range_and_the_same_one_again(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(jsonl(prompts(60)))
    found = dry_run(job(tmp_path), 8, io.StringIO())
    assert len(found.sample) == 8
    low, mean, high = found.as_json()["completion_tokens"]
    assert low < mean < high
    again = dry_run(job(tmp_path), 8, io.StringIO())
    assert again.sample == found.sample


def test_a_model_that_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(jsonl(prompts(1)))
    with pytest.raises(JobRefused, match="nowhere"):
        dry_run(job(tmp_path, engine={"model": "nowhere"}), 1, io.StringIO())
