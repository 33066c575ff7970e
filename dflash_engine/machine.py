"""What a measurement was made on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "vllm")


def machine() -> dict[str, Any]:
    """Processors and versions, None for a package that is not installed."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found
