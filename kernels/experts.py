"""Products of rows with the experts that they were routed to, and the sum of a row's experts.

Each pair of row and expert is a row of its own in one chain of tensor-core steps (see `products`), its
result is rounded to the model's dtype, and a row's results are added in float32 from its best expert on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import STORE, run_linear
from kernels.norm import run_rms_norm
from kernels.products import (
    check_rows,
    launch,
    plain_rows,
    products,
    start_early,
    wait_for_inputs,
)
from kernels.routing import Routing, run_routing
from kernels.tiles import Tile

_COLUMNS = 512
"""Columns of a program that adds up a row's experts."""


@triton.jit
def _experts_kernel(
    x,
    x_stride,
    w,
    experts,
    sizes,
    pairs,
    out,
    N,
    K,
    SHARE: tl.constexpr,
    PAIR: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """out[p] = y, or silu(y) * y2 (PAIR), with y = x[p / SHARE] W^T for the pairs p of a tile.

    w [E, N, K], or [E, 2 N, K] with y2 of rows N to 2 N. SHARE pairs side by side have one row of x.
    """
    start_early(PDL)
    tiles_n = tl.cdiv(N, BN)
    tile = tl.program_id(0) // tiles_n
    n = tl.program_id(0) % tiles_n * BN + tl.arange(0, BN)
    wait_for_inputs(PDL)
    size = tl.load(sizes + tile)
    if size == 0:
        return
    at = tl.arange(0, BT)
    pair = tl.load(pairs + tile * BT + at, mask=at < size, other=0)
    mine = w + tl.load(experts + tile).to(tl.int64) * (N * (2 if PAIR else 1)) * K
    acc, acc2 = products(
        x,
        x_stride,
        pair // SHARE,
        at < size,
        x,
        0.0,
        mine,
        n,
        N + n,
        n < N,
        K,
        0,
        PAIR,
        BN,
        BT,
        BK,
        EVEN_K,
        PDL,
    )
    if PAIR:
        acc = acc / (1.0 + tl.exp(-acc)) * acc2
    where = out + pair[None, :].to(tl.int64) * N + n[:, None]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (at < size)[None, :])


@triton.jit
def _combine_kernel(
    mixed,
    weights,
    residual,
    residual_stride,
    tap,
    tap_stride,
    N,
    TOP_K: tl.constexpr,
    TAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual[t] += sum over ranks r of weights[t, r] mixed[t TOP_K + r], rounded once; tap[t] the same."""
    start_early(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = t * TOP_K + rank
        weight = tl.load(weights + pair).to(tl.float32)
        total += weight * tl.load(mixed + pair * N + n, mask=n < N, other=0.0).to(tl.float32)
    where = residual + t * residual_stride + n
    total += tl.load(where, mask=n < N, other=0.0).to(tl.float32)
    result = total.to(residual.dtype.element_ty)
    tl.store(where, result, mask=n < N)
    if TAP:
        tl.store(tap + t * tap_stride + n, result, mask=n < N)


def expert_tile(block: int, *, pair: bool, itemsize: int) -> Tile:
    """A tile for `block` pairs; no choice changes a bit. Where an expert has few pairs, the program is a
    stream of weights, and as for linears of few rows few warps and many stages are right."""
    if itemsize == 4:
        return Tile(16, block, 32, 4, 2)
    if block == 16:
        return Tile(16, 16, 64, 2, 8) if pair else Tile(16, 16, 128, 2, 5)
    return Tile(32, 32, 64, 4, 5) if block == 32 else Tile(64, 64, 64, 4, 4)


def run_pairs(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    silu: bool,
    share: int,
    pdl: bool,
    tile: Tile | None = None,
) -> Tensor:
    """[P, N] of the routed pairs of x [P / share, K] and weight [E, N, K] (silu: [E, 2 N, K], gate first).

    Raises `ValueError` for shapes that do not fit.
    """
    width = x.shape[1]
    num_pairs = routing.weights.numel()
    check_rows("x", x, width)
    if weight.dim() != 3 or weight.shape[2] != width or not weight.is_contiguous():
        raise ValueError(
            f"weight is {tuple(weight.shape)} with strides {weight.stride()} for rows of {width}"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype} for rows in {x.dtype}")
    if len(x) * share != num_pairs:
        raise ValueError(f"x has {len(x)} rows for {num_pairs} pairs, {share} a row")
    num_out = weight.shape[1] // (2 if silu else 1)
    tile = tile or expert_tile(routing.block, pair=silu, itemsize=x.element_size())
    if routing.block != tile.BT:
        raise ValueError(f"tile takes {tile.BT} pairs, the routing gives {routing.block}")
    out = torch.empty((num_pairs, num_out), dtype=x.dtype, device=x.device)
    _experts_kernel[(len(routing.sizes) * triton.cdiv(num_out, tile.BN),)](
        x,
        x.stride(0),
        weight,
        routing.experts,
        routing.sizes,
        routing.pairs,
        out,
        num_out,
        width,
        SHARE=share,
        PAIR=silu,
        EVEN_K=width % tile.BK == 0,
        PDL=pdl,
        BN=tile.BN,
        BT=tile.BT,
        BK=tile.BK,
        **launch(pdl, tile.num_warps, tile.num_stages),
    )
    return out


def run_combine(mixed: Tensor, weights: Tensor, residual: Tensor, tap: Tensor | None, pdl: bool) -> None:
    """Adds mixed [T top_k, H], times weights [T, top_k], to residual [T, H] in place; tap gets a copy."""
    num_rows, top_k = weights.shape
    width = mixed.shape[1]
    if mixed.shape[0] != num_rows * top_k or not mixed.is_contiguous() or not weights.is_contiguous():
        raise ValueError(f"mixed is {tuple(mixed.shape)} for {num_rows} rows of {top_k} experts")
    for name, tensor in (("residual", residual), ("tap", tap)):
        if tensor is not None:
            check_rows(name, tensor, width)
            if len(tensor) != num_rows:
                raise ValueError(f"{name} has {len(tensor)} rows, weights {num_rows}")
    _combine_kernel[(num_rows, triton.cdiv(width, _COLUMNS))](
        mixed,
        weights,
        residual,
        residual.stride(0),
        tap,
        tap.stride(0) if tap is not None else 0,
        width,
        TOP_K=top_k,
        TAP=tap is not None,
        COLUMNS=_COLUMNS,
        PDL=pdl,
        **launch(pdl),
    )


def run_experts(
    residual: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalise: bool,
    tap: Tensor | None,
    pdl: bool,
    into: Tensor | None = None,
) -> None:
    """See `experts` of `dflash_engine.ops.Ops`; `into` [T, H] is added to in place of the residual where
    given. Raises `ValueError` for shapes that do not fit."""
    num_rows, width = residual.shape
    num_experts = len(router)
    inner = gate_up.shape[1] // 2
    shapes = (tuple(gate_up.shape), tuple(down.shape))
    if shapes != ((num_experts, 2 * inner, width), (num_experts, width, inner)):
        raise ValueError(f"gate_up and down are {shapes} for {num_experts} experts on rows of {width}")
    if num_rows == 0:
        return
    x = run_rms_norm(residual, norm, eps, pdl)
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=residual.device)
    run_linear(plain_rows(x), router, None, logits, STORE, None, pdl)
    routing = run_routing(logits, top_k, renormalise, residual.dtype, pdl)
    mixed = run_pairs(x, gate_up, routing, silu=True, share=top_k, pdl=pdl)
    mixed = run_pairs(mixed, down, routing, silu=False, share=1, pdl=pdl)
    run_combine(mixed, routing.weights, residual if into is None else into, tap, pdl)
