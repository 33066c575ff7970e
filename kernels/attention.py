"""Paged attention of a few query tokens per sequence, for decoding, verifying, drafting and prefill alike.

A tile is up to a number of rows of one sequence with all query heads of one KV head, so that keys and values
are read once for all of them. The softmax is taken over SPLIT keys at fixed positions, and these states are
merged from left to right, in one program or, where there are few tiles, by the last of many programs from
the states of all: the same operations in the same order, so a row's result depends on its own range of keys
alone. What a row does not see leaves its state as it is, to the bit. Row sums too are products (with ones),
since those have one order in every tile size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.products import SUM, dot, empty_rows, launch, start_early, wait_for_inputs

SPLIT = 128
_LOG2E = 1.4426950408889634


@triton.jit
def merged(best, total, mixed, other_best, other_total, other_mixed):
    """Two softmax states of disjoint keys as one."""
    new_best = tl.maximum(best, other_best)
    anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
    fade, gain = tl.exp2(best - anchor), tl.exp2(other_best - anchor)
    new_total = tl.fma(total, fade, other_total * gain)
    new_mixed = tl.fma(mixed, fade[:, None], other_mixed * gain[:, None])
    return new_best, new_total, new_mixed


@triton.jit
def _cells(table, first, low, high, block_size, SPLIT: tl.constexpr):
    """Cells int64 [SPLIT] of the keys from `first` on, and which of them are between low and high."""
    at = first + tl.arange(0, SPLIT)
    known = (at >= low) & (at < high)
    block = tl.load(table + at // block_size, mask=known, other=0).to(tl.int64)
    return block * block_size + at % block_size, known


@triton.jit
def _state(
    q, begin, end, first, cells, known, keys, values, kv_head, num_kv_heads, scale,
    HEAD: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """(maximum, sum, mixed values) of rows q [ROWS, DIMS] over SPLIT keys."""
    d = tl.arange(0, DIMS)
    at = first + tl.arange(0, SPLIT)
    there = known[:, None] & (d < HEAD)[None, :]
    place = ((cells * num_kv_heads + kv_head) * HEAD)[:, None] + d[None, :]
    k = tl.load(keys + place, mask=there, other=0.0)
    v = tl.load(values + place, mask=there, other=0.0)
    scores = dot(q, tl.trans(k), tl.zeros((ROWS, SPLIT), SUM)).to(tl.float32) * scale
    seen = (at[None, :] >= begin[:, None]) & (at[None, :] < end[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    best = tl.max(scores, axis=1)
    anchor = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(scores - anchor[:, None]).to(q.dtype)
    ones = tl.full((SPLIT, 16), 1.0, tl.float32).to(q.dtype)
    total = dot(weights, ones, tl.zeros((ROWS, 16), SUM))
    mixed = dot(weights, v, tl.zeros((ROWS, DIMS), SUM))
    return best, tl.max(total, axis=1).to(tl.float32), mixed.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["num_splits"])
def _attention_kernel(
    query, keys, values, tables, table_stride, row_seq, begin, end, tiles, out, part_state, part_mixed,
    arrived, num_heads, num_kv_heads, block_size, num_splits, scale,
    GROUP: tl.constexpr, GROUP_DIM: tl.constexpr, HEAD: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row r of the tile is token r // GROUP_DIM, query head r % GROUP_DIM of the KV head's group.

    Where the rows are was known before the model's first layer, so it is read before the wait.
    """
    start_early(PDL)
    first_row = tl.load(tiles + 2 * tl.program_id(0))
    count = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIMS)
    token, member = r // GROUP_DIM, r % GROUP_DIM
    r_ok = (token < count) & (member < GROUP)
    row = (first_row + token).to(tl.int64)
    row_begin = tl.load(begin + row, mask=r_ok, other=0)
    row_end = tl.load(end + row, mask=r_ok, other=0)
    low = tl.min(tl.where(r_ok, row_begin, 2147483647), axis=0)
    high = tl.max(row_end, axis=0)
    if count > 0:
        table = tables + tl.load(row_seq + first_row).to(tl.int64) * table_stride
        head = kv_head * GROUP + member
        place = (row * num_heads + head)[:, None] * HEAD + d[None, :]
        inside = r_ok[:, None] & (d < HEAD)[None, :]
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, DIMS), tl.float32)
        if PARTS:
            split = tl.program_id(2)
            first = split * SPLIT
            cells, known = _cells(table, first, low, high, block_size, SPLIT)
            wait_for_inputs(PDL)
            part = (row * num_heads + head) * num_splits
            if (first < high) & (first + SPLIT > low):
                q = tl.load(query + place, mask=inside, other=0.0)
                best, total, mixed = _state(
                    q, row_begin, row_end, first, cells, known, keys, values, kv_head, num_kv_heads, scale,
                    HEAD, DIMS, ROWS, SPLIT,
                )  # fmt: skip
                tl.store(part_state + 2 * (part + split), best, mask=r_ok)
                tl.store(part_state + 2 * (part + split) + 1, total, mask=r_ok)
                tl.store(part_mixed + (part + split)[:, None] * HEAD + d[None, :], mixed, mask=inside)
            tl.debug_barrier()
            counter = arrived + tl.program_id(0) * num_kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
                best = tl.full((ROWS,), float("-inf"), tl.float32)
                total = tl.zeros((ROWS,), tl.float32)
                mixed = tl.zeros((ROWS, DIMS), tl.float32)
                for other in range(low // SPLIT, tl.cdiv(high, SPLIT)):
                    # Other multiprocessors wrote these: past the first cache.
                    state = part_state + 2 * (part + other)
                    other_best = tl.load(state, mask=r_ok, other=float("-inf"), cache_modifier=".cg")
                    other_total = tl.load(state + 1, mask=r_ok, other=0.0, cache_modifier=".cg")
                    where = part_mixed + (part + other)[:, None] * HEAD + d[None, :]
                    other_mixed = tl.load(where, mask=inside, other=0.0, cache_modifier=".cg")
                    best, total, mixed = merged(best, total, mixed, other_best, other_total, other_mixed)
                result = mixed / tl.where(r_ok, total, 1.0)[:, None]
                tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
        else:
            wait_for_inputs(PDL)
            q = tl.load(query + place, mask=inside, other=0.0)
            for first in range(low // SPLIT * SPLIT, high, SPLIT):
                cells, known = _cells(table, first, low, high, block_size, SPLIT)
                other_best, other_total, other_mixed = _state(
                    q, row_begin, row_end, first, cells, known, keys, values, kv_head, num_kv_heads, scale,
                    HEAD, DIMS, ROWS, SPLIT,
                )  # fmt: skip
                best, total, mixed = merged(best, total, mixed, other_best, other_total, other_mixed)
            result = mixed / tl.where(r_ok, total, 1.0)[:, None]
            tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    else:
        wait_for_inputs(PDL)


def tokens_per_tile(longest: int, group: int) -> int:
    """Rows of a sequence that one program takes: all of a short block, 128 rows and heads at most."""
    group_dim = int(triton.next_power_of_2(group))
    return max(1, min(int(triton.next_power_of_2(longest)), 128 // group_dim), 16 // group_dim)


def run_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    row_seq: Tensor,
    begin: Tensor,
    end: Tensor,
    tiles: Tensor,
    tokens: int,
    num_splits: int,
    arrived: Tensor,
    pdl: bool,
) -> Tensor:
    """Row t attends to positions begin[t] <= p < end[t] of sequence row_seq[t].

    query [T, Hq, D]; caches [blocks, block, Hkv, D]; tables int32 [sequences, blocks]; row_seq, begin, end
    int32 [T]; tiles int32 [tiles, 2]: (first row, rows) of one sequence, at most `tokens` each, 0 rows for
    a tile of padding; rows in no tile are not written. num_splits 0: one program for all keys of a tile;
    else a program for each SPLIT keys up to num_splits, which no row's `end` may exceed; the last of a
    tile's programs to arrive merges what all of them wrote. arrived int32 [>= tiles Hkv] is zero before and
    after. Returns [T, Hq D].
    """
    num_rows, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = keys.shape
    if num_heads % num_kv_heads or keys.shape != values.shape or keys.shape[-1] != head_dim:
        raise ValueError(f"query {tuple(query.shape)} does not fit caches of {tuple(keys.shape)}")
    for name, index in (("row_seq", row_seq), ("begin", begin), ("end", end)):
        if index.shape != (num_rows,) or index.dtype != torch.int32 or not index.is_contiguous():
            raise ValueError(f"{name} is {index.dtype} {tuple(index.shape)}, not int32 for {num_rows} rows")
    if tiles.dim() != 2 or tiles.shape[1] != 2 or tiles.dtype != torch.int32 or not tiles.is_contiguous():
        raise ValueError(f"tiles is {tiles.dtype} {tuple(tiles.shape)}, not int32 [tiles, 2]")
    if tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError(f"tables is {tables.dtype} with strides {tables.stride()}, not rows of int32")
    if num_splits and arrived.numel() < len(tiles) * num_kv_heads:
        raise ValueError(
            f"arrived has {arrived.numel()} counters for {len(tiles)} tiles of {num_kv_heads} heads"
        )
    if not (query.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("query and caches have to be contiguous")
    group = num_heads // num_kv_heads
    group_dim = triton.next_power_of_2(group)
    rows = max(16, tokens * group_dim)
    out = empty_rows(num_rows, num_heads * head_dim, query)
    parts = num_splits > 0
    shape = (num_rows, num_heads, num_splits)
    state = torch.empty((*shape, 2), dtype=torch.float32, device=query.device) if parts else out
    mixed = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device) if parts else out
    dims = max(16, triton.next_power_of_2(head_dim))
    _attention_kernel[(len(tiles), num_kv_heads, max(num_splits, 1))](
        query, keys, values, tables, tables.stride(0), row_seq, begin, end, tiles, out, state, mixed, arrived,
        num_heads, num_kv_heads, block_size, num_splits, head_dim**-0.5 * _LOG2E,
        GROUP=group, GROUP_DIM=group_dim, HEAD=head_dim, DIMS=dims, ROWS=rows, SPLIT=SPLIT,
        PARTS=parts, PDL=pdl,
        **launch(pdl, 8 if rows >= 128 else 4, 2 if query.element_size() == 4 else 3),
    )  # fmt: skip
    return out
