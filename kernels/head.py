"""The best token of each row over the vocabulary, without ever holding the logits.

Each program gives the best of its part of the vocabulary for each row, with the request's Gumbel noise
added where the row has a temperature; a second kernel takes the best of the parts. Of equals, the lower
token id wins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.noise import gumbel, position_key
from kernels.products import (
    Rows,
    can_describe,
    check_rows,
    described,
    launch,
    products,
    start_early,
    tile_of,
    wait_for_inputs,
    wide_products,
)
from kernels.tiles import Tile, head_tile

_NO_TOKEN = tl.constexpr(2147483647)


@triton.jit(do_not_specialize_on_alignment=["T"])
def _best_kernel(
    x,
    x_stride,
    scale,
    eps,
    w,
    slots,
    positions,
    temperature,
    keys,
    part_score,
    part_token,
    T,
    N,
    K,
    NORM: tl.constexpr,
    NOISE: tl.constexpr,
    WIDE: tl.constexpr,
    FLIP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    start_early(PDL)
    tile_n, tile_t = tile_of(T, N, BT, BN, GROUP)
    n = tile_n * BN + tl.arange(0, BN)
    t = tile_t * BT + tl.arange(0, BT)
    t_ok = t < T
    if WIDE:
        score, _ = wide_products(
            x, w, scale, tile_t * BT, tile_n * BN, 0, T, K, NORM, False, FLIP, BN, BT, BK, PDL
        )
    else:
        score, _ = products(
            x, x_stride, t, t_ok, scale, eps, w, n, n, n < N, K, NORM, False, BN, BT, BK, EVEN_K, PDL
        )
    if NOISE:
        slot = tl.load(slots + t, mask=t_ok, other=0)
        slot = tl.maximum(slot, 0)
        heat = tl.load(temperature + slot, mask=t_ok, other=0.0)
        key = position_key(
            tl.load(keys + slot, mask=t_ok, other=0), tl.load(positions + t, mask=t_ok, other=0)
        )
        warm = score / tl.where(heat > 0, heat, 1.0)[None, :] + gumbel(key[None, :], n[:, None])
        score = tl.where((heat > 0)[None, :], warm, score)
    score = tl.where((n < N)[:, None] & t_ok[None, :], score, float("-inf"))
    best = tl.max(score, axis=0)
    token = tl.min(tl.where(score == best[None, :], n[:, None], _NO_TOKEN), axis=0)
    where = part_score + tile_n.to(tl.int64) * T + t
    tl.store(where, best, mask=t_ok)
    tl.store(part_token + tile_n.to(tl.int64) * T + t, token, mask=t_ok)


@triton.jit(do_not_specialize_on_alignment=["T"])
def _best_of_parts_kernel(
    part_score, part_token, out, T, num_parts, N, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    start_early(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.full((BLOCK,), _NO_TOKEN, tl.int32)
    for start in range(0, num_parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        score = tl.load(part_score + part.to(tl.int64) * T + t, mask=part < num_parts, other=float("-inf"))
        there = tl.load(part_token + part.to(tl.int64) * T + t, mask=part < num_parts, other=_NO_TOKEN)
        better = (score > best) | ((score == best) & (there < token))
        best = tl.where(better, score, best)
        token = tl.where(better, there, token)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, token, _NO_TOKEN), axis=0)
    # A row of padding may be NaN and have no best token; its choice is not used, but has to be a token.
    tl.store(out + t, tl.where(winner < N, winner, 0))


def run_best(
    rows: Rows,
    weight: Tensor,
    noise: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    pdl: bool,
    tile: Tile | None = None,
) -> Tensor:
    """int32 [T]: the best token of each row of x [T, K] under the head's weight [V, K].

    noise: slots int32 [T] and positions int32 [T] of the rows, and by slot the temperature float32 [S] (0:
    no noise) and the request's key. Raises `ValueError` for shapes that do not fit.
    """
    num_rows, width = rows.x.shape
    vocab = weight.shape[0]
    check_rows("x", rows.x, width)
    check_rows("weight", weight, width)
    size = rows.x.element_size()
    wide = can_describe(rows.x, weight)
    if tile is None:
        tile = head_tile(num_rows, width, size, wide=wide)
    parts = triton.cdiv(vocab, tile.BN)
    score = torch.empty((parts, num_rows), dtype=torch.float32, device=rows.x.device)
    token = torch.empty((parts, num_rows), dtype=torch.int32, device=rows.x.device)
    out = torch.empty(num_rows, dtype=torch.int32, device=rows.x.device)
    x, w = described(rows.x, weight, tile) if wide else (rows.x, weight)
    slots, positions, temperature, keys = noise if noise is not None else (None, None, None, None)
    _best_kernel[(parts * triton.cdiv(num_rows, tile.BT),)](
        x,
        rows.x.stride(0),
        rows.scale,
        rows.eps,
        w,
        slots,
        positions,
        temperature,
        keys,
        score,
        token,
        num_rows,
        vocab,
        width,
        NORM=rows.mode,
        NOISE=noise is not None,
        WIDE=wide,
        FLIP=tile.flip,
        EVEN_K=width % tile.BK == 0,
        PDL=pdl,
        BN=tile.BN,
        BT=tile.BT,
        BK=tile.BK,
        GROUP=8,
        **launch(pdl, tile.num_warps, tile.num_stages),
    )
    _best_of_parts_kernel[(num_rows,)](
        score, token, out, num_rows, parts, vocab, BLOCK=1024, PDL=pdl, **launch(pdl)
    )
    return out
