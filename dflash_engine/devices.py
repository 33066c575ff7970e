"""The device of an engine, and of each rank of one."""

from __future__ import annotations

import torch

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError


def select_device(config: EngineConfig, rank: int) -> torch.device:
    """The rank's device, which becomes this thread's current one. Raises `ConfigError`."""
    device, size = _device(config.device), config.tensor_parallel_size
    if size == 1:
        use_device(device)
        return device
    if device.type == "cpu":
        if config.ops in ("auto", "cpu"):
            raise ConfigError(
                f"tensor_parallel_size {size} needs as many GPUs; on a CPU, where it is of no use but to try "
                "it, it needs ops reference"
            )
        return device
    if device.index:
        raise ConfigError(
            f"device {config.device!r} with tensor_parallel_size {size}: use cuda, which means GPUs 0 to "
            f"{size - 1} of CUDA_VISIBLE_DEVICES"
        )
    if torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size {size} needs as many GPUs, this machine has {torch.cuda.device_count()}"
        )
    device = torch.device("cuda", rank)
    use_device(device)
    return device


def use_device(device: torch.device) -> None:
    """Makes a GPU this thread's current one: Triton launches kernels there, wherever their tensors are."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)
