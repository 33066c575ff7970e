"""The operations of a layer made of simple ones, for implementations that have no fused kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.noise import gumbel_reference


def choose_experts(
    scores: Tensor, top_k: int, renormalise: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weights [T, top_k] in `dtype` and ids [T, top_k] of each row's best experts, best first.

    Softmax of float32 `scores` [T, E] over all experts, the lower id first of equals, and with
    `renormalise` the chosen weights scaled to a sum of 1 (transformers' Qwen3MoeTopKRouter). Sums are made
    of elementwise steps: torch's own order of reduction may depend on the number of rows.
    """
    probabilities = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = probabilities
    while (width := total.shape[1]) > 1:
        half = (width + 1) // 2
        total = torch.cat([total[:, : width - half] + total[:, half:], total[:, width - half : half]], dim=1)
    ordered, ids = torch.sort(probabilities / total, dim=-1, descending=True, stable=True)
    weights, chosen = ordered[:, :top_k], ids[:, :top_k]
    if renormalise:
        kept = weights[:, :1].clone()
        for rank in range(1, top_k):
            kept += weights[:, rank : rank + 1]
        weights = weights / kept
    return weights.to(dtype), chosen


class _Simple(Protocol):
    def pack(self, weight: Tensor) -> Any: ...
    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor: ...
    def wide_linear(self, x: Tensor, weight: Any) -> Tensor: ...
    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Any) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
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
    ) -> Tensor: ...
    def sum_of_experts(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Any,
        gate_up: Sequence[Any],
        down: Sequence[Any],
        top_k: int,
        renormalise: bool,
    ) -> Tensor: ...


class ComposedOps:
    """See `dflash_engine.ops.Ops` for what each operation computes."""

    def qkv(
        self: _Simple,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: Any,
        bias: Tensor | None,
        num_heads: int,
        norms: tuple[Tensor | None, Tensor | None],
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        mixed = self.linear(self.rms_norm(residual, norm, eps), weight, bias)
        return self.rope_store(mixed, num_heads, norms, eps, rope, positions, slots, k_cache, v_cache)

    def add_linear(
        self: _Simple,
        residual: Tensor,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        tap: Tensor | None = None,
    ) -> None:
        residual.add_(self.linear(x, weight, bias))
        if tap is not None:
            tap.copy_(residual)

    def gate_up(
        self: _Simple, residual: Tensor, norm: Tensor, eps: float, weight: Any, bias: Tensor | None
    ) -> Tensor:
        return self.silu_mul(self.linear(self.rms_norm(residual, norm, eps), weight, bias))

    def pack_experts(self: _Simple, matrices: Iterable[Tensor], num: int) -> list[Any]:
        packed = [self.pack(matrix) for matrix in matrices]
        if len(packed) != num:
            raise ValueError(f"matrices are {len(packed)}, num is {num}")
        return packed

    def sum_of_experts(
        self: _Simple,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Any,
        gate_up: Sequence[Any],
        down: Sequence[Any],
        top_k: int,
        renormalise: bool,
    ) -> Tensor:
        """What `experts` adds, in float32 [T, H]."""
        x = self.rms_norm(residual, norm, eps)
        weights, chosen = choose_experts(self.wide_linear(x, router), top_k, renormalise, x.dtype)
        mixed = x.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, ranks = torch.where(chosen == expert)
            inner = self.silu_mul(self.linear(x[rows], gate_up[expert]))
            mixed[rows, ranks] = self.linear(inner, down[expert])
        total = residual.new_zeros(residual.shape, dtype=torch.float32)
        for rank in range(top_k):
            total += weights[:, rank : rank + 1].float() * mixed[:, rank].float()
        return total

    def experts(
        self: _Simple,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Any,
        gate_up: Sequence[Any],
        down: Sequence[Any],
        top_k: int,
        renormalise: bool,
        tap: Tensor | None,
    ) -> None:
        total = self.sum_of_experts(residual, norm, eps, router, gate_up, down, top_k, renormalise)
        residual.copy_(residual.float() + total)
        if tap is not None:
            tap.copy_(residual)

    def logits(self: _Simple, x: Tensor, norm: Tensor, eps: float, weight: Any) -> Tensor:
        return self.wide_linear(self.rms_norm(x, norm, eps), weight)

    def best(
        self: _Simple,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Any,
        noise: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    ) -> Tensor:
        scores = self.logits(x.contiguous(), norm, eps, weight)
        if noise is not None:
            slots, positions, temperature, keys = noise
            for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
                heat, key = float(temperature[max(slot, 0)]), int(keys[max(slot, 0)])
                if heat > 0:
                    gumbel = gumbel_reference(key, position, scores.shape[1], x.device)
                    scores[row] = scores[row] / heat + gumbel
        return scores.argmax(-1).int()

    def context(
        self: _Simple,
        features: Tensor,
        fc: Any,
        norm: Tensor,
        eps: float,
        kv: Any,
        bias: Tensor | None,
        k_norms: Tensor,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_caches: Tensor,
        v_caches: Tensor,
    ) -> None:
        mixed = self.linear(self.rms_norm(self.linear(features, fc), norm, eps), kv, bias)
        for layer, part in enumerate(mixed.chunk(len(k_caches), dim=1)):
            norms, caches = (None, k_norms[layer]), (k_caches[layer], v_caches[layer])
            self.rope_store(part, 0, norms, eps, rope, positions, slots, *caches)
