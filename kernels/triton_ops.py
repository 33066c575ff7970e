"""The engine's operations as Triton kernels, for NVIDIA GPUs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention import run_attention
from kernels.experts import run_experts
from kernels.head import run_best
from kernels.linear import ADD, SILU, STORE, run_linear
from kernels.norm import run_rms_norm
from kernels.products import empty_rows, normed_rows, plain_rows
from kernels.rope import Place, can_fuse, run_qkv, run_rope_store

WIDTH_MULTIPLE = 16
EARLY_WIDTH = 2048
"""A wider model's kernels fill the GPU, and the next one set up early only takes room (an H200 needs 12.8 ms
with it and 12.1 without for 256 tokens of Qwen3-8B, but 0.80 and 0.94 for 24 of SmolLM2-135M)."""
MAX_COUNTERS = 1 << 16
"""Attention tiles times KV heads that may be cut into several programs; more of them are not cut."""


def source_digest() -> str:
    """16 hexadecimal digits that change with the kernels' sources: for what is measured, not for results."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()


class Tiling(NamedTuple):
    """How attention is cut into programs."""

    tiles: Tensor
    """int32 [tiles, 2]: first row and number of rows of one sequence; 0 rows for padding."""
    tokens: int
    """Most rows of a tile."""
    num_splits: int
    """0: a tile's keys are one program's; else one of so many programs each has a fixed part of them."""


class TritonOps:
    """See `dflash_engine.ops.Ops` for what each operation computes. Nothing here waits for the device."""

    name = "triton"
    version = "1"

    def __init__(self, device: torch.device, width: int = 0) -> None:
        """width: of the model's narrowest rows, which decides how its kernels follow each other."""
        self._arrived = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
        early = width <= EARLY_WIDTH and device.type == "cuda"
        self._pdl = early and torch.cuda.get_device_capability(device) >= (9, 0)

    @staticmethod
    def supports(widths: tuple[int, ...], head_dims: tuple[int, ...]) -> bool:
        return all(width % WIDTH_MULTIPLE == 0 for width in widths) and all(
            head_dim % 16 == 0 for head_dim in head_dims
        )

    def pack(self, weight: Tensor, norm: Tensor | None = None) -> Tensor:
        if norm is None:
            return weight.contiguous()
        # Each row's product is scaled once at its end, so the norm's weights have to be in the matrix.
        return weight.mul_(norm).contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = empty_rows(len(x), len(weight), x)
        return run_linear(plain_rows(x), weight, bias, out, STORE, None, self._pdl)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return run_rms_norm(x, weight, eps, self._pdl)

    def qkv(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        num_heads: int,
        norms: tuple[Tensor | None, Tensor | None],
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        place = Place(rope, positions, slots, k_cache, v_cache)
        rows = normed_rows(residual, eps, self._pdl)
        if can_fuse(len(residual), k_cache.shape[-1], norms):
            return run_qkv(rows, weight, bias, num_heads, place, self._pdl)
        mixed = empty_rows(len(residual), len(weight), residual)
        run_linear(rows, weight, bias, mixed, STORE, None, self._pdl)
        return run_rope_store(mixed, num_heads, norms, eps, place, self._pdl)

    def attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: Tensor,
        row_seq: Tensor,
        begin: Tensor,
        end: Tensor,
        tiling: Tiling | None = None,
    ) -> Tensor:
        if tiling is None:
            raise ValueError("attention needs a tiling on a GPU")
        return run_attention(
            query, k_cache, v_cache, tables, row_seq, begin, end, *tiling, self._arrived, self._pdl
        )

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor | None = None
    ) -> None:
        run_linear(plain_rows(x), weight, bias, residual, ADD, tap, self._pdl)

    def gate_up(
        self, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        rows = normed_rows(residual, eps, self._pdl)
        out = empty_rows(len(residual), len(weight) // 2, residual)
        return run_linear(rows, weight, bias, out, SILU, None, self._pdl)

    def pack_experts(self, matrices: Iterable[Tensor], num: int) -> Tensor:
        stacked: Tensor | None = None
        count = 0
        for matrix in matrices:
            if stacked is None:
                stacked = matrix.new_empty((num, *matrix.shape))
            stacked[count] = matrix
            count += 1
        if stacked is None or count != num:
            raise ValueError(f"matrices are {count}, num is {num}")
        return stacked

    def experts(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        top_k: int,
        renormalise: bool,
        tap: Tensor | None,
    ) -> None:
        run_experts(residual, norm, eps, router, gate_up, down, top_k, renormalise, tap, self._pdl)

    def context(
        self,
        features: Tensor,
        fc: Tensor,
        norm: Tensor,
        eps: float,
        kv: Tensor,
        bias: Tensor | None,
        k_norms: Tensor,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_caches: Tensor,
        v_caches: Tensor,
    ) -> None:
        rows = normed_rows(self.linear(features, fc), eps, self._pdl)
        mixed = empty_rows(len(features), len(kv), features)
        run_linear(rows, kv, bias, mixed, STORE, None, self._pdl)
        place = Place(rope, positions, slots, k_caches, v_caches)
        run_rope_store(mixed, 0, (None, k_norms), eps, place, self._pdl)

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        out = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
        rows = plain_rows(self.rms_norm(x, norm, eps))
        return run_linear(rows, weight, None, out, STORE, None, self._pdl)

    def argmax(self, logits: Tensor) -> list[int]:
        best: list[int] = logits.argmax(-1).tolist()
        return best

    def best(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        noise: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    ) -> Tensor:
        """int32 [T]: the best token for each row, norm and head included; see `kernels.head.run_best`."""
        return run_best(plain_rows(self.rms_norm(x, norm, eps)), weight, noise, self._pdl)
