"""Calls of every operation, each for any choice of its rows, and the same operations as plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

Case = Callable[[Any, Tensor], Tensor]
"""(ops, indices of the rows to compute) -> their results [rows, ...]"""

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ROWS = (1, 7, 8, 9, 17, 63)
EPS = 1e-5
BLOCK = 8


class FormulaOps:
    """Each operation in float64 as its definition says it, rounded once at the end."""

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        wide_bias = None if bias is None else bias.double()
        return F.linear(x.double(), weight.double(), wide_bias).to(x.dtype)

    def wide_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.double(), weight.double()).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.double(), x.shape[-1:], weight.double(), eps).to(weight.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.double().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)

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
        kv_heads, head_dim = k_cache.shape[-2:]
        sizes = [num_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        query, key, value = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, dim=1))
        q, k = (
            part.double() if norm is None else F.rms_norm(part.double(), (head_dim,), norm.double(), eps)
            for part, norm in zip((query, key), norms, strict=True)
        )
        cos, sin = (torch.cat([table, table], dim=-1)[positions.long()].double() for table in rope)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
        k_cache.flatten(0, 1)[slots] = k.to(k_cache.dtype)
        v_cache.flatten(0, 1)[slots] = value
        return q.to(qkv.dtype)

    def attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: Tensor,
        row_seq: Tensor,
        begin: Tensor,
        end: Tensor,
    ) -> Tensor:
        block = k_cache.shape[1]
        group = query.shape[1] // k_cache.shape[2]
        out = torch.empty_like(query)
        for sequence in row_seq.unique().tolist():
            rows = row_seq == sequence
            at = torch.arange(int(begin[rows].min()), int(end[rows].max()))
            slots = tables[sequence].long()[at // block] * block + at % block
            key, value = (
                cache.flatten(0, 1)[slots].double().repeat_interleave(group, 1).transpose(0, 1)
                for cache in (k_cache, v_cache)
            )
            mask = (at >= begin[rows].unsqueeze(1)) & (at < end[rows].unsqueeze(1))
            q = query[rows].double().transpose(0, 1)
            out[rows] = F.scaled_dot_product_attention(q, key, value, mask).transpose(0, 1).to(query.dtype)
        return out.flatten(1)


def noise(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def linear(
    dtype: torch.dtype, rows: int, outputs: int, width: int, *, bias: bool = False, head: bool = False
) -> Case:
    x = noise(1, rows, width, dtype=dtype)
    weight = noise(2, outputs, width, dtype=dtype, scale=width**-0.5)
    added = noise(3, outputs, dtype=dtype) if bias else None

    def run(ops: Any, chosen: Tensor) -> Tensor:
        if head:
            return ops.wide_linear(x[chosen], ops.pack(weight))
        return ops.linear(x[chosen], ops.pack(weight), added)

    return run


def rms_norm(dtype: torch.dtype, rows: int, width: int) -> Case:
    x, weight = noise(1, rows, width, dtype=dtype, scale=3), 1 + noise(3, width, dtype=dtype, scale=0.2)
    return lambda ops, chosen: ops.rms_norm(x[chosen], weight, EPS)


def silu_mul(dtype: torch.dtype, rows: int, inner: int) -> Case:
    gate_up = noise(1, rows, 2 * inner, dtype=dtype, scale=4)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -90.0, 0.0])
    return lambda ops, chosen: ops.silu_mul(gate_up[chosen])


def rope_store(
    dtype: torch.dtype, rows: int, heads: int, kv_heads: int, head_dim: int, *, normed: bool, strided: bool
) -> Case:
    """The rows' queries, and what stands at their slots in the two caches, side by side."""
    width = (heads + 2 * kv_heads) * head_dim
    wide = noise(1, rows, 3 * width, dtype=dtype, scale=2)
    q_norm, k_norm = (1 + noise(seed, head_dim, dtype=dtype, scale=0.2) for seed in (2, 3))
    order = torch.Generator().manual_seed(4)
    positions = torch.randint(0, 300, (rows,), generator=order, dtype=torch.int32)
    blocks = -(-rows // BLOCK) + 2
    slots = torch.randperm(blocks * BLOCK, generator=order)[:rows]
    angles = torch.outer(torch.arange(300.0), 10_000 ** (-torch.arange(0, head_dim, 2) / head_dim))
    rope = (angles.cos(), angles.sin())

    def run(ops: Any, chosen: Tensor) -> Tensor:
        qkv = wide[chosen].chunk(3, dim=1)[1]
        caches = [torch.full((blocks, BLOCK, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2)]
        query = ops.rope_store(
            qkv if strided else qkv.contiguous(),
            heads,
            (q_norm, k_norm) if normed else (None, None),
            EPS,
            rope,
            positions[chosen],
            slots[chosen],
            *caches,
        )
        assert query.shape == (len(chosen), heads, head_dim)
        for cache in caches:
            assert int(cache.isnan().sum()) == cache.numel() - len(chosen) * kv_heads * head_dim
        stored = [cache.flatten(0, 1)[slots[chosen]].flatten(1) for cache in caches]
        return torch.cat([query.flatten(1), *stored], dim=1)

    return run


SEGMENTS = ((0, 9), (70, 8), (130, 1), (5, 1), (37, 44))
"""(first position, rows) of each sequence in a pass: 63 rows, over several chunks and tiles."""


def attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    causal: bool = True,
    segments: tuple[tuple[int, int], ...] = SEGMENTS,
) -> Case:
    """Sequences in scattered blocks; what no row of a sequence may see is NaN in both caches."""
    order = torch.Generator().manual_seed(5)
    per_sequence = -(-max(start + rows for start, rows in segments) // BLOCK)
    blocks = per_sequence * len(segments)
    tables = torch.randperm(blocks, generator=order).to(torch.int32).view(len(segments), per_sequence)
    k_cache, v_cache = (
        torch.full((blocks, BLOCK, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2)
    )
    ranges = []
    for index, (start, rows) in enumerate(segments):
        for position in range(start, start + rows):
            first = 0 if window is None else max(position - window + 1, 0)
            last = position + 1 if causal else start + rows
            ranges.append((index, first, last))
        seen = torch.arange(min(first for at, first, _ in ranges if at == index), start + rows)
        slots = tables[index].long()[seen // BLOCK] * BLOCK + seen % BLOCK
        for seed, cache in ((6, k_cache), (7, v_cache)):
            cache.flatten(0, 1)[slots] = noise(seed + 2 * index, len(seen), kv_heads, head_dim, dtype=dtype)
    row_seq, begin, end = torch.tensor(ranges, dtype=torch.int32).T.contiguous()
    query = noise(8, len(ranges), heads, head_dim, dtype=dtype)

    def run(ops: Any, chosen: Tensor) -> Tensor:
        indices = (index[chosen] for index in (row_seq, begin, end))
        return ops.attention(query[chosen], k_cache, v_cache, tables, *indices)

    return run


def cases(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Case]]:
    """Every operation on this many rows, but for attention, in shapes that are awkward somewhere."""
    for outputs, width, bias in ((1, 16, False), (31, 48, True), (33, 64, True), (100, 576, False)):
        yield f"linear {outputs}x{width}", linear(dtype, rows, outputs, width, bias=bias)
    yield "wide linear", linear(dtype, rows, 992, 64, bias=True)
    yield "logits", linear(dtype, rows, 323, 64, head=True)
    for width in (16, 48, 576):
        yield f"rms_norm {width}", rms_norm(dtype, rows, width)
    for inner in (16, 48, 1536):
        yield f"silu_mul {inner}", silu_mul(dtype, rows, inner)
    for heads, kv_heads, head_dim in ((4, 2, 16), (9, 3, 64), (2, 2, 128), (0, 2, 64)):
        for normed in (False, True):
            yield (
                f"rope_store {heads} heads over {kv_heads} of {head_dim}, normed {normed}",
                rope_store(dtype, rows, heads, kv_heads, head_dim, normed=normed, strided=heads != 4),
            )


def attention_cases(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    for heads, kv_heads, head_dim, window, causal in (
        (4, 2, 16, None, True),
        (4, 2, 16, None, False),
        (4, 2, 16, 1, True),
        (9, 3, 64, 20, True),
        (9, 3, 64, None, True),
        (4, 1, 128, 20, False),
        (2, 2, 32, 70, False),
    ):
        yield (
            f"attention {heads} heads over {kv_heads} of {head_dim}, window {window}, causal {causal}",
            attention(dtype, heads, kv_heads, head_dim, window=window, causal=causal),
        )
    yield "attention of one row", attention(dtype, 4, 2, 64, segments=((0, 1),))


def every_case(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Case, int]]:
    """Name, call and number of rows."""
    yield from ((name, case, rows) for name, case in cases(dtype, rows))
    for name, case in attention_cases(dtype) if rows == 63 else ():
        yield name, case, 1 if name.endswith("one row") else rows


def assert_rows_stand_alone(ops: Any, dtype: torch.dtype, rows: int) -> None:
    """To the bit: each row alone, and in other company and at another place, is as among all."""
    for name, case, num in every_case(dtype, rows):
        together = case(ops, torch.arange(num))
        assert not together.isnan().any(), name
        for chosen in (torch.arange(num).flip(0), torch.arange(num // 3, num), torch.arange(0, num, 2)):
            assert torch.equal(case(ops, chosen), together[chosen]), f"{name}: rows {chosen.tolist()}"
        for row in {0, num // 2, num - 1}:
            alone = case(ops, torch.tensor([row]))
            assert torch.equal(alone, together[row : row + 1]), f"{name}: row {row} alone"
