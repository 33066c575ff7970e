"""Training under Ray Train: two workers on a local cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from pipelines.training import train_on_ray
from tests.dflash_engine.training.tiny_run import config_for, target_folder, write_data

# Ray Train warns of its own deprecated settings, and Ray Data of its own.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def cluster() -> Iterator[None]:
    """Room for the two workers."""
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    yield
    ray.shutdown()


def test_two_workers_train_one_draft(tmp_path: Path):
    target = target_folder(tmp_path)
    data = write_data(target, tmp_path / "data", 60)
    config = config_for(target, data, tmp_path / "out", budget={"steps": 10})
    summary = train_on_ray(config, 2)
    assert summary["finished"] and summary["step"] == 10
    assert (tmp_path / "out" / "draft" / "model.safetensors").is_file()
