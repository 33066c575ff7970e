"""The state of a run on disk: whole or not at all, so that a kill costs only the steps since."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_engine.errors import ConfigError

NAME = "state.safetensors"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands."""

    step: int
    """Steps made."""
    steps: int
    """In all."""
    windows: int
    config_digest: str
    corpus_digest: str
    world_size: int
    seconds: float = 0.0
    """Of training, over all starts."""
    history: tuple[Mapping[str, Any], ...] = field(default=())
    """Held-out acceptance and loss, as they were on the way."""


def save(folder: Path, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the state before."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{NAME}.unfinished"
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, unfinished, metadata={"progress": json.dumps(asdict(progress))})
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(folder / NAME)


def load(folder: Path) -> tuple[Progress, dict[str, Tensor]] | None:
    """None where nothing was saved. Raises `ConfigError` where it cannot be read."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads(file.metadata()["progress"])
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; remove it to begin anew") from error
    return Progress(**values | {"history": tuple(values["history"])}), tensors


def check(progress: Progress, wanted: Progress, folder: Path) -> None:
    """Raises `ConfigError` where the state is of another run than the one asked for."""
    for name, what in (
        ("config_digest", "settings"),
        ("corpus_digest", "data"),
        ("world_size", "number of GPUs"),
    ):
        if getattr(progress, name) != getattr(wanted, name):
            raise ConfigError(
                f"{folder / NAME} is of a run with other {what}: give another output, or remove it"
            )
