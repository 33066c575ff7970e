"""On a GPU: captured and compiled steps train what single kernels train, and the run goes on as on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_engine.training.config import TrainConfig
from dflash_engine.training.trainer import Options, train
from tests.dflash_engine.training.tiny_run import config_for, target_folder, write_data

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("gpu")
    target = target_folder(folder)
    return config_for(target, write_data(target, folder / "data", 120), folder / "out", budget={"steps": 24})


def weights(
    config: TrainConfig, output: Path, options: Options | None = None, **changes: Any
) -> torch.Tensor:
    run = {"device": "cuda", "dtype": "bfloat16", "checkpoint_every": 8, "log_every": 8, **changes}
    values = config.model_dump() | {"output": str(output), "run": run, "features": {"reserve_gib": 1}}
    checks = {"min_response_tokens": 1, "min_own_tokens": 0.3}
    train(TrainConfig(**(values | {"checks": checks})), options)
    return load_file(output / "state.safetensors")["weights"]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def test_a_captured_step_is_the_same_step(config: TrainConfig, tmp_path: Path):
    plain = weights(config, tmp_path / "plain", compile=False, cuda_graphs=False)
    captured = weights(config, tmp_path / "captured", compile=False, cuda_graphs=True)
    assert distance(plain, captured) < 1e-3


def test_a_compiled_step_differs_by_rounding_alone(config: TrainConfig, tmp_path: Path):
    plain = weights(config, tmp_path / "plain", compile=False, cuda_graphs=False)
    compiled = weights(config, tmp_path / "compiled", compile=True, cuda_graphs=True)
    assert distance(plain, compiled) < 0.05


def test_a_stopped_run_ends_with_the_same_bits(config: TrainConfig, tmp_path: Path):
    whole = weights(config, tmp_path / "whole")
    asked = iter([False] * 10)
    weights(config, tmp_path / "pieces", Options(stop=lambda: next(asked, True)))
    assert torch.equal(weights(config, tmp_path / "pieces"), whole)
