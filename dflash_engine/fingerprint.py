"""What decides an answer beside the request: equal fingerprints give equal tokens.

The draft is no part of it: it changes how fast an answer comes, never which one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from dflash_engine.checkpoint import weight_files

FULL_BYTES = 1 << 30
SAMPLE_BYTES = 1 << 20
NUM_SAMPLES = 256
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""Instruction sets by which the matrix libraries choose their kernels."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that results are exact within."""

    weights: str
    """From `weights_digest`."""
    dtype: str
    device: str
    """From `device_kind`."""
    kernels: str
    """Version or digest of the operations that compute."""
    tensor_parallel_size: int
    torch: str
    triton: str
    """Empty where triton is not used."""
    grammars: str
    """Version of the library that says which tokens a grammar allows; empty where there is none."""

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that change with any field."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(fields.encode(), digest_size=8).hexdigest()


def device_kind(device: torch.device) -> str:
    """The GPU architecture, such as `cuda sm_90`, or the CPU's instruction sets that matter here."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda sm_{major}{minor}"
    return " ".join(["cpu", platform.machine(), torch.backends.cpu.get_cpu_capability(), *_cpu_flags()])


def triton_version() -> str:
    """The installed triton's version, or an empty text."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def weights_digest(folder: Path) -> str:
    """32 hexadecimal digits over config.json and the weights (blake2b).

    Up to 1 GiB of safetensors every byte counts. Beyond that, for each file: its size, its header
    (names, dtypes, shapes) and 1 MiB at regular distances, about 256 such samples in all. The same
    tensors cut into other files have another digest. Raises `ConfigError` where there are none.
    """
    files = weight_files(folder)
    total = sum(path.stat().st_size for path in files)
    digest = hashlib.blake2b(digest_size=16)
    for path in (folder / "config.json", *files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        for piece in _whole(path) if total <= FULL_BYTES else _sampled(path, size, total):
            digest.update(piece)
    return digest.hexdigest()


def _whole(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(SAMPLE_BYTES):
            yield piece


def _sampled(path: Path, size: int, total: int) -> Iterator[bytes]:
    if size <= SAMPLE_BYTES:
        yield from _whole(path)
        return
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        yield file.read(min(header_bytes, size))
        num_samples = max(1, math.ceil(NUM_SAMPLES * size / total))
        for sample in range(num_samples):
            file.seek(sample * (size - SAMPLE_BYTES) // max(1, num_samples - 1))
            yield file.read(SAMPLE_BYTES)


def _cpu_flags() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return [platform.processor()]
    lines = cpuinfo.read_text().lower().splitlines()
    listed = next((line for line in lines if line.startswith(("flags", "features"))), "")
    return sorted(set(listed.split()) & set(CPU_FLAGS))
