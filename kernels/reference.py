"""The engine's operations in plain torch, for any device: what every kernel is compared with.

Exact by shape: torch picks its algorithm, and so its order of reduction, by the shape of a call.
Rows are therefore always computed in tiles of a fixed number of rows (the last one padded), and
attention in chunks of a fixed number of keys, so that every call has the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.composed import ComposedOps

CHUNK = 64
"""Keys per attention chunk. A chunk outside a row's range leaves the row's sums as they are, to the bit."""


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight [N, K] as it is."""

    matrix: Tensor

    @property
    def out_features(self) -> int:
        return self.matrix.shape[0]


class ReferenceOps(ComposedOps):
    """See `dflash_engine.ops.Ops` for what each operation computes."""

    name = "reference"
    version = "1"

    def __init__(self, tile: int = 16) -> None:
        self.tile = tile

    def _by_tiles(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, -rows % self.tile))
        tiles = [compute(tile) for tile in padded.split(self.tile)]
        return torch.cat(tiles)[:rows] if tiles else compute(padded)

    def pack(self, weight: Tensor, norm: Tensor | None = None) -> PlainWeight:
        return PlainWeight(weight)

    def linear(self, x: Tensor, weight: PlainWeight, bias: Tensor | None = None) -> Tensor:
        return self._by_tiles(lambda tile: F.linear(tile, weight.matrix, bias), x)

    def wide_linear(self, x: Tensor, weight: PlainWeight) -> Tensor:
        return self.linear(x, weight).float()

    def argmax(self, logits: Tensor) -> list[int]:
        best: list[int] = logits.argmax(-1).tolist()
        return best

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._by_tiles(lambda tile: _normalise(tile, weight, eps), x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        # Not F.silu: it computes the ends of the pieces that torch's threads take with another exp.
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)

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
        heads = qkv.reshape(qkv.shape[0], -1, head_dim)
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        cos, sin = (table[positions.long()].unsqueeze(1) for table in rope)
        key = self._turn(key, norms[1], eps, cos, sin)
        k_cache.view(-1, num_kv_heads, head_dim)[slots] = key
        v_cache.view(-1, num_kv_heads, head_dim)[slots] = value
        return self._turn(query, norms[0], eps, cos, sin)

    def _turn(self, heads: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """RMSNorm over each head where the model has one, then rotate its halves against each other."""
        x = heads.float()
        if norm is not None:
            weight = norm.float()
            x = self._by_tiles(lambda tile: _normalise(tile, weight, eps), x)
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(heads.dtype)

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
        out = torch.empty_like(query)
        sequence = row_seq.tolist()
        first = 0
        while first < len(sequence):
            last = first
            while last < len(sequence) and sequence[last] == sequence[first] and last - first < self.tile:
                last += 1
            rows = slice(first, last)
            out[rows] = self._attend(
                query[rows], k_cache, v_cache, tables[sequence[first]], begin[rows], end[rows]
            )
            first = last
        return out.flatten(1)

    def _attend(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, begin: Tensor, end: Tensor
    ) -> Tensor:
        """One tile of rows of one sequence over its keys, chunk by chunk with a running softmax."""
        rows, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = k_cache.shape
        group = num_heads // num_kv_heads
        pad = (0, self.tile - rows)
        begin, end = F.pad(begin.long(), pad), F.pad(end.long(), pad)
        q = F.pad(query.float(), (0, 0, 0, 0, *pad)).view(self.tile, num_kv_heads, group, head_dim)
        q = q.permute(1, 0, 2, 3).reshape(num_kv_heads, self.tile * group, head_dim) * head_dim**-0.5
        best = q.new_full((num_kv_heads, self.tile * group, 1), -torch.inf)
        total = torch.zeros_like(best)
        mixed = torch.zeros_like(q)
        low, high = int(begin[:rows].min()), int(end[:rows].max())
        for chunk in range(low // CHUNK, -(-high // CHUNK)):
            at = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK, device=q.device)
            known = (at >= low) & (at < high)
            at_known = torch.where(known, at, low)
            slots = table[at_known // block_size].long() * block_size + at_known % block_size
            k = k_cache.view(-1, num_kv_heads, head_dim)[slots].float()
            v = v_cache.view(-1, num_kv_heads, head_dim)[slots].float()
            seen = (at >= begin[:, None]) & (at < end[:, None])
            scores = torch.bmm(q, k.permute(1, 2, 0))
            scores = scores.masked_fill(~seen.repeat_interleave(group, 0), -torch.inf)
            new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
            anchor = torch.where(new_best.isinf(), 0.0, new_best)
            weights = torch.exp(scores - anchor)
            fade = torch.exp(best - anchor)
            total = total * fade + weights.sum(-1, keepdim=True)
            mixed = mixed * fade + torch.bmm(weights, v.permute(1, 0, 2))
            best = new_best
        mixed = (mixed / total).view(num_kv_heads, self.tile, group, head_dim)
        return mixed.permute(1, 0, 2, 3).reshape(self.tile, num_heads, head_dim)[:rows].to(query.dtype)


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
