"""Which experts a row of a mixture goes to, with what weights, and the rows of each expert as tiles.

A pair is one row at one of its experts: number t * top_k + rank for the rank-th best expert of row t.
Pairs are cut into tiles of one expert each, so that an expert's weights are read once for all rows of a
tile. Which tile a pair lands in follows from the other rows, its arithmetic does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.products import launch, start_early, wait_for_inputs

MAX_EXPERTS = 1024
"""A program has the scores of `_ROWS` rows for all experts in its registers."""
_ROWS = 16
"""Rows a program chooses for: always as many, so that a row's softmax has one order of summation."""
_BLOCKS = 16
"""Blocks of rows whose counts are added at once."""
_TILES = 32
"""Entries of the table of tiles that are written at once."""


class Routing(NamedTuple):
    """The weights of all pairs, and the tiles of pairs."""

    weights: Tensor
    """[T, top_k] in the model's dtype, best expert first."""
    experts: Tensor
    """int32 [tiles]: whose pairs these are."""
    sizes: Tensor
    """int32 [tiles]: how many pairs, 0 for tiles that nobody needed."""
    pairs: Tensor
    """int32 [tiles, block]: their numbers; behind `sizes` there is nothing to read."""

    @property
    def block(self) -> int:
        return self.pairs.shape[1]


@triton.jit
def _best_experts(
    logits,
    t,
    T,
    E,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
):
    """Ranks int32 [ROWS, E_PAD] of the chosen experts, -1 for others; their weights [ROWS, K_PAD] by rank.

    A row of NaN gets the experts 0, 1, ... with weights of NaN: ids are valid whatever the row holds.
    """
    expert = tl.arange(0, E_PAD)[None, :]
    rank_at = tl.arange(0, K_PAD)[None, :]
    row_ok = (t < T)[:, None]
    real = expert < E
    scores = tl.load(logits + t[:, None].to(tl.int64) * E + expert, mask=row_ok & real, other=0.0)
    scores = tl.where(real, scores, float("-inf"))
    raised = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    probs = raised / tl.sum(raised, axis=1)[:, None]
    # Left to choose from: -1 stands for NaN, -2 for no expert, -3 for taken.
    left = tl.where(real, tl.where(probs == probs, probs, -1.0), -2.0)
    ranks = tl.full((ROWS, E_PAD), -1, tl.int32)
    weights = tl.zeros((ROWS, K_PAD), tl.float32)
    kept = tl.zeros((ROWS,), tl.float32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(left, axis=1)[:, None]
        mine = expert == tl.min(tl.where(left == best, expert, E_PAD), axis=1)[:, None]
        weight = tl.sum(tl.where(mine, probs, 0.0), axis=1)
        weights = tl.where(rank_at == rank, weight[:, None], weights)
        kept += weight
        ranks = tl.where(mine & row_ok, rank, ranks)
        left = tl.where(mine, -3.0, left)
    if RENORMALISE:
        weights = weights / kept[:, None]
    return ranks, weights


@triton.jit
def _ends(total, BLOCK: tl.constexpr):
    """The tile behind the last one of each expert, for `total` [E_PAD] pairs of each."""
    return tl.cumsum((total + BLOCK - 1) // BLOCK, axis=0)


@triton.jit
def _place_pairs(
    pairs, t, ranks, before, total, TOP_K: tl.constexpr, BLOCK: tl.constexpr, E_PAD: tl.constexpr
):
    """Writes the pairs of these rows into the tiles, behind `before` [E_PAD] pairs of earlier rows."""
    chosen = ranks >= 0
    one = chosen.to(tl.int32)
    first = _ends(total, BLOCK) - (total + BLOCK - 1) // BLOCK
    slot = (first * BLOCK + before)[None, :] + tl.cumsum(one, axis=0) - one
    tl.store(pairs + slot, t[:, None] * TOP_K + ranks, mask=chosen)


@triton.jit
def _write_tiles(
    experts, sizes, total, num_tiles, BLOCK: tl.constexpr, TILES: tl.constexpr, E_PAD: tl.constexpr
):
    """Expert and size of each tile, for `total` [E_PAD] pairs of each expert."""
    end = _ends(total, BLOCK)
    first = end - (total + BLOCK - 1) // BLOCK
    expert = tl.arange(0, E_PAD)[None, :]
    for start in range(0, num_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        owner = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        left = total[None, :] - (tile[:, None] - first[None, :]) * BLOCK
        size = tl.sum(tl.where(expert == owner[:, None], left, 0), axis=1)
        tl.store(experts + tile, owner, mask=tile < num_tiles)
        tl.store(sizes + tile, tl.minimum(size, BLOCK), mask=tile < num_tiles)


@triton.jit(do_not_specialize=["T", "num_tiles"])
def _choose_kernel(
    logits,
    weights,
    ranks,
    counts,
    pairs,
    experts,
    sizes,
    T,
    E,
    num_tiles,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Softmax and top-k of a block of rows. ALONE, it makes the tiles too, else `_group_kernel` does."""
    start_early(PDL)
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    t = block * ROWS + tl.arange(0, ROWS)
    at_rank = tl.arange(0, K_PAD)[None, :]
    expert = tl.arange(0, E_PAD)
    found, share = _best_experts(logits, t, T, E, TOP_K, RENORMALISE, ROWS, E_PAD, K_PAD)
    where = weights + t[:, None].to(tl.int64) * TOP_K + at_rank
    tl.store(where, share.to(weights.dtype.element_ty), mask=(t < T)[:, None] & (at_rank < TOP_K))
    total = tl.sum((found >= 0).to(tl.int32), axis=0)
    if ALONE:
        _place_pairs(pairs, t, found, tl.zeros_like(total), total, TOP_K, BLOCK, E_PAD)
        _write_tiles(experts, sizes, total, num_tiles, BLOCK, TILES, E_PAD)
    else:
        at = ranks + t[:, None].to(tl.int64) * E_PAD + expert[None, :]
        tl.store(at, found.to(tl.int8), mask=(t < T)[:, None])
        tl.store(counts + block * E_PAD + expert, total)


@triton.jit(do_not_specialize=["T", "num_tiles", "num_blocks"])
def _group_kernel(
    ranks,
    counts,
    pairs,
    experts,
    sizes,
    T,
    num_tiles,
    num_blocks,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    E_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b < num_blocks places the pairs of a block of rows, the last one writes the table of tiles."""
    start_early(PDL)
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    expert = tl.arange(0, E_PAD)
    total = tl.zeros((E_PAD,), tl.int32)
    before = tl.zeros((E_PAD,), tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        other = start + tl.arange(0, BLOCKS)
        at = counts + other[:, None] * E_PAD + expert[None, :]
        count = tl.load(at, mask=(other < num_blocks)[:, None], other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((other < block)[:, None], count, 0), axis=0)
    if block < num_blocks:
        t = block * ROWS + tl.arange(0, ROWS)
        at_row = ranks + t[:, None].to(tl.int64) * E_PAD + expert[None, :]
        found = tl.load(at_row, mask=(t < T)[:, None], other=-1).to(tl.int32)
        _place_pairs(pairs, t, found, before, total, TOP_K, BLOCK, E_PAD)
    else:
        _write_tiles(experts, sizes, total, num_tiles, BLOCK, TILES, E_PAD)


def block_of(num_rows: int, num_experts: int, top_k: int) -> int:
    """Pairs a tile: about as many as an expert gets, so that few weights are read twice."""
    mean = num_rows * top_k / num_experts
    return 16 if mean <= 8 or num_rows <= 16 else 32 if mean <= 24 else 64


def most_tiles(num_pairs: int, num_experts: int, block: int) -> int:
    """How many tiles there are at most: each expert that is used has one that is not full."""
    return (num_pairs + (block - 1) * min(num_pairs, num_experts)) // block


def run_routing(
    logits: Tensor, top_k: int, renormalise: bool, dtype: torch.dtype, pdl: bool, block: int | None = None
) -> Routing:
    """`kernels.composed.choose_experts` for float32 logits [T, E], T > 0, and its pairs as tiles.

    Shapes follow from T alone, so that a CUDA graph can hold it. Raises `ValueError`.
    """
    if logits.dim() != 2 or not logits.is_contiguous() or logits.dtype != torch.float32 or not len(logits):
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}")
    num_rows, num_experts = logits.shape
    if not 1 <= top_k <= min(num_experts, 127):
        raise ValueError(f"top_k {top_k} of {num_experts} experts")
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"logits are for {num_experts} experts, at most {MAX_EXPERTS} are possible")
    block = block or block_of(num_rows, num_experts, top_k)
    num_tiles = most_tiles(num_rows * top_k, num_experts, block)
    num_blocks = triton.cdiv(num_rows, _ROWS)
    padded = triton.next_power_of_2(num_experts)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    routing = Routing(
        empty(num_rows, top_k, dtype=dtype), empty(num_tiles), empty(num_tiles), empty(num_tiles, block)
    )
    tables = (routing.pairs, routing.experts, routing.sizes)
    alone = num_blocks == 1
    ranks = None if alone else empty(num_rows, padded, dtype=torch.int8)
    counts = None if alone else empty(num_blocks, padded)
    _choose_kernel[(num_blocks,)](
        logits,
        routing.weights,
        ranks,
        counts,
        *tables,
        num_rows,
        num_experts,
        num_tiles,
        TOP_K=top_k,
        RENORMALISE=renormalise,
        ALONE=alone,
        BLOCK=block,
        ROWS=_ROWS,
        TILES=_TILES,
        E_PAD=padded,
        K_PAD=triton.next_power_of_2(top_k),
        PDL=pdl,
        **launch(pdl),
    )
    if not alone:
        _group_kernel[(num_blocks + 1,)](
            ranks,
            counts,
            *tables,
            num_rows,
            num_tiles,
            num_blocks,
            TOP_K=top_k,
            BLOCK=block,
            ROWS=_ROWS,
            BLOCKS=_BLOCKS,
            TILES=_TILES,
            E_PAD=padded,
            PDL=pdl,
            **launch(pdl),
        )
    return routing
