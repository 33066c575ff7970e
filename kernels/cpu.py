"""The engine's operations on CPUs, compiled on this machine from cpu.cpp with the system's C++ compiler.

Exact by construction: an output element's order of operations depends on nothing but its own row (see
cpu.cpp). Measured on 2 cores with AVX-512 but no bf16 instructions, one pass over the embedded model's
layers and head with 8 rows: torch's bf16 `F.linear` takes several times as long as reading the weights.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.arena import Arena
from kernels.composed import ComposedOps

PANEL = 32
HEAD_DIMS = frozenset({16, 32, 64, 96, 128, 256})
_SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-fPIC",
    "-shared",
    "-pthread",
)
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] as panels [ceil(N / 32), K, 32] in cpu.cpp's order, the outputs behind N zero."""

    panels: Tensor
    out_features: int
    in_features: int


def cache_dir() -> Path:
    return Path(os.environ.get("DFLASH_CACHE") or Path.home() / ".cache" / "dflash")


def _processor() -> str:
    """What `-march=native` means here: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))


def build_digest() -> str:
    """Identifies source, flags and processor; equal digests compute equal bits."""
    text = "\0".join([_SOURCE.read_text(), *_FLAGS, _processor()])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@functools.cache
def _library() -> ctypes.CDLL:
    target = cache_dir() / "kernels" / f"cpu-{build_digest()}.so"
    try:
        _build(target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(str(error)) from error


def _build(target: Path) -> None:
    if target.exists():
        return
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler found; install g++ or set CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "cpu.so"
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        built.replace(target)


_ARGUMENTS = {
    "linear": "ppppllli",
    "logits": "ppppllli",
    "rms_norm": "pppllfi",
    "silu_mul": "pplli",
    "rope_store": "pllllppfpppppppli",
    "attention": "ppppllpppfplllli",
}
"""C types of each function's arguments: pointer, long, float, int."""
_C_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float, "i": ctypes.c_int}


def _functions(library: ctypes.CDLL) -> dict[tuple[str, torch.dtype], Callable[..., None]]:
    functions: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
    for name, letters in _ARGUMENTS.items():
        for dtype, suffix in _SUFFIX.items():
            function = library[f"{name}_{suffix}"]
            function.argtypes = [_C_TYPES[letter] for letter in letters]
            function.restype = None
            functions[name, dtype] = function
    return functions


def _address(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous() or tensor.dtype != dtype or (shape and tensor.shape != shape):
        raise ValueError(
            f"needs a contiguous {dtype} tensor of shape {shape or 'any'}, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def _require(condition: bool, problem: str) -> None:
    """The kernels read and write raw memory: what they would misread has to be refused here."""
    if not condition:
        raise ValueError(problem)


class CpuOps(ComposedOps):
    """See `dflash_engine.ops.Ops` for what each operation computes. Raises `BuildError`."""

    name = "cpu"

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._functions = _functions(_library())
        self._arena = Arena()
        self.version = build_digest()

    @staticmethod
    def supports(widths: tuple[int, ...], head_dims: tuple[int, ...]) -> bool:
        """Row widths in whole vectors of 16, and a head size that has been compiled."""
        return all(width % 16 == 0 for width in widths) and set(head_dims) <= HEAD_DIMS

    def pack(self, weight: Tensor, norm: Tensor | None = None) -> PackedWeight:
        out_features, in_features = weight.shape
        panels = -(-out_features // PANEL)
        padded = torch.nn.functional.pad(weight, (0, 0, 0, panels * PANEL - out_features))
        packed = padded.view(panels, PANEL, in_features).transpose(1, 2)
        if weight.dtype == torch.bfloat16:
            packed = packed.unflatten(2, (2, PANEL // 2)).transpose(2, 3).flatten(2)
        return PackedWeight(self._arena.copy(packed), out_features, in_features)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype)
        return self._multiply("linear", x, weight, bias, out)

    def wide_linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        out = torch.empty(x.shape[0], weight.out_features, dtype=torch.float32)
        return self._multiply("logits", x, weight, None, out)

    def argmax(self, logits: Tensor) -> list[int]:
        # On one thread numpy's is vectorised and torch's is not.
        best: list[int] = logits.numpy().argmax(-1).tolist()
        return best

    def _multiply(
        self, name: str, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor
    ) -> Tensor:
        (rows, width), dtype = x.shape, x.dtype
        if width != weight.in_features:
            raise ValueError(f"x has {width} columns, the weight takes {weight.in_features}")
        _require(dtype in _SUFFIX, f"{dtype} is not compiled")
        bias_address = _address(bias, dtype, weight.out_features)
        pointers = (_address(x, dtype), _address(weight.panels, dtype), bias_address, out.data_ptr())
        self._functions[name, dtype](*pointers, rows, weight.out_features, width, self._threads)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        (rows, width), dtype = x.shape, x.dtype
        _require(width % 16 == 0, f"rows of {width} are not whole vectors of 16")
        pointers = (_address(x, dtype), _address(weight, dtype, width), out.data_ptr())
        self._functions["rms_norm", dtype](*pointers, rows, width, eps, self._threads)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        (rows, width), dtype = gate_up.shape, gate_up.dtype
        _require(width % 32 == 0, f"rows of twice {width / 2} are not whole vectors of 16")
        out = torch.empty(rows, width // 2, dtype=dtype)
        pointers = (_address(gate_up, dtype), out.data_ptr())
        self._functions["silu_mul", dtype](*pointers, rows, width // 2, self._threads)
        return out

    def rope_store(
        self,
        qkv: Tensor,
        num_heads: int,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        num_kv_heads, head_dim = k_cache.shape[-2:]
        rows, dtype = qkv.shape[0], qkv.dtype
        if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim or qkv.stride(1) != 1:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)} and strides {qkv.stride()}")
        _require(head_dim in HEAD_DIMS, f"head size {head_dim} is not compiled")
        query = torch.empty(rows, num_heads, head_dim, dtype=dtype)
        self._functions["rope_store", dtype](
            qkv.data_ptr(),
            qkv.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            *(_address(norm, dtype, head_dim) for norm in norms),
            eps,
            *(_address(table, torch.float32, len(table), head_dim // 2) for table in rope),
            _address(positions, torch.int32, rows),
            _address(slots, torch.int64, rows),
            query.data_ptr(),
            _address(k_cache, dtype),
            _address(v_cache, dtype, *k_cache.shape),
            rows,
            self._threads,
        )
        return query

    def attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: Tensor,
        row_seq: Tensor,
        begin: Tensor,
        end: Tensor,
        tiling: Any = None,
    ) -> Tensor:
        (rows, num_heads, head_dim), dtype = query.shape, query.dtype
        _, block_size, num_kv_heads, _ = k_cache.shape
        problem = f"head size {head_dim} with {num_heads} over {num_kv_heads} heads is not compiled"
        _require(head_dim in HEAD_DIMS and num_heads % num_kv_heads == 0, problem)
        cache_shape = (k_cache.shape[0], block_size, num_kv_heads, head_dim)
        out = torch.empty(rows, num_heads * head_dim, dtype=dtype)
        self._functions["attention", dtype](
            _address(query, dtype),
            *(_address(cache, dtype, *cache_shape) for cache in (k_cache, v_cache)),
            _address(tables, torch.int32),
            tables.shape[1],
            block_size,
            *(_address(index, torch.int32, rows) for index in (row_seq, begin, end)),
            head_dim**-0.5,
            out.data_ptr(),
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
            self._threads,
        )
        return out
