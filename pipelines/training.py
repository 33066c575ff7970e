"""The training of a draft under Ray Train: the same function, in workers that Ray starts and restarts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from dflash_engine.errors import ConfigError
from dflash_engine.training.config import SUMMARY, TrainConfig
from pipelines.cluster import ray_cluster

RESTARTS = 3
"""Of a worker group in which one failed; each goes on from the last state."""


def train_on_ray(config: TrainConfig, num_workers: int, stop_after_s: float | None = None) -> dict[str, Any]:
    """Trains with one worker a GPU, or on CPUs where the cluster has none, and returns rank 0's summary.

    The output folder has to be one that all workers and the caller see. Raises `ConfigError`.
    """
    with ray_cluster():
        on_gpu = config.run.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= num_workers
        if not on_gpu and config.run.device.startswith("cuda"):
            raise ConfigError(f"--ray {num_workers}: the cluster has fewer GPUs")
        TorchTrainer(
            train_here,
            train_loop_config={"config": config.model_dump(mode="json"), "stop_after_s": stop_after_s},
            scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=on_gpu),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=RESTARTS)),
        ).fit()
    summary: dict[str, Any] = json.loads((Path(config.output) / SUMMARY).read_text())
    return summary


def train_here(task: dict[str, Any]) -> None:
    """In each worker, once Ray has joined them by torch.distributed."""
    from dflash_engine.training.trainer import Options, train

    stop_after_s = task["stop_after_s"]
    end = None if stop_after_s is None else time.monotonic() + stop_after_s
    train(TrainConfig(**task["config"]), Options(stop=lambda: end is not None and time.monotonic() > end))
