"""Rotary position embedding, q/k norms and the write into the paged cache; also as the end of the qkv
product."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.products import Rows, check_rows, launch, products, start_early, wait_for_inputs
from kernels.tiles import Tile, qkv_tile

FUSED_ROWS = 16
"""With more rows, the qkv product and the rotation are two kernels."""


@triton.jit
def rotated(low, high, cos, sin):
    """Halves of heads turned against each other, float32; the roundings are spelled out."""
    return tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)


@triton.jit
def _rope_store_kernel(
    qkv,
    qkv_stride,
    layer_width,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    positions,
    slots,
    query,
    keys,
    values,
    layer_stride,
    num_heads,
    num_kv_heads,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token of one layer: its heads [q | k | v] of qkv [T, layers * layer_width]."""
    start_early(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    d_ok = d < HEAD // 2
    is_q = h < num_heads
    is_k = (h >= num_heads) & (h < num_heads + num_kv_heads)
    is_v = (h >= num_heads + num_kv_heads) & (h < num_heads + 2 * num_kv_heads)
    at = qkv + t * qkv_stride + layer * layer_width + h * HEAD + d
    there = (is_q | is_k | is_v) & d_ok
    low = tl.load(at, mask=there, other=0.0).to(tl.float32)
    high = tl.load(at + HEAD // 2, mask=there, other=0.0).to(tl.float32)
    value_low, value_high = low, high
    if Q_NORM or K_NORM:
        factor = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD + eps)[:, None]
        if K_NORM:
            weight = k_norm + layer * HEAD + d
            low = tl.where(is_k, low * factor * tl.load(weight, mask=d_ok, other=0.0).to(tl.float32), low)
            weight_high = tl.load(weight + HEAD // 2, mask=d_ok, other=0.0).to(tl.float32)
            high = tl.where(is_k, high * factor * weight_high, high)
        if Q_NORM:
            low = tl.where(is_q, low * factor * tl.load(q_norm + d, mask=d_ok, other=0.0).to(tl.float32), low)
            weight_high = tl.load(q_norm + d + HEAD // 2, mask=d_ok, other=0.0).to(tl.float32)
            high = tl.where(is_q, high * factor * weight_high, high)
    position = tl.load(positions + t).to(tl.int64)
    c = tl.load(cos + position * (HEAD // 2) + d, mask=d_ok, other=0.0)
    s = tl.load(sin + position * (HEAD // 2) + d, mask=d_ok, other=0.0)
    low, high = rotated(low, high, c, s)
    kind = qkv.dtype.element_ty
    q_at = query + (t * num_heads + h) * HEAD + d
    tl.store(q_at, low.to(kind), mask=is_q & d_ok)
    tl.store(q_at + HEAD // 2, high.to(kind), mask=is_q & d_ok)
    cell = layer.to(tl.int64) * layer_stride + tl.load(slots + t) * num_kv_heads * HEAD
    k_at = keys + cell + (h - num_heads) * HEAD + d
    tl.store(k_at, low.to(kind), mask=is_k & d_ok)
    tl.store(k_at + HEAD // 2, high.to(kind), mask=is_k & d_ok)
    v_at = values + cell + (h - num_heads - num_kv_heads) * HEAD + d
    tl.store(v_at, value_low.to(kind), mask=is_v & d_ok)
    tl.store(v_at + HEAD // 2, value_high.to(kind), mask=is_v & d_ok)


@triton.jit(do_not_specialize_on_alignment=["T"])
def _qkv_kernel(
    x,
    x_stride,
    eps,
    w,
    bias,
    cos,
    sin,
    positions,
    slots,
    query,
    keys,
    values,
    T,
    K,
    num_heads,
    num_kv_heads,
    BIAS: tl.constexpr,
    HEAD: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """BN dimensions of the lower half of one head, and their partners of the upper half, for BT tokens."""
    start_early(PDL)
    PIECES: tl.constexpr = HEAD // 2 // BN
    head = tl.program_id(0) // PIECES
    d = tl.program_id(0) % PIECES * BN + tl.arange(0, BN)
    n = head * HEAD + d
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    t_ok = t < T
    low, high = products(
        x, x_stride, t, t_ok, x, eps, w, n, n + HEAD // 2, n >= 0, K, 1, True, BN, BT, BK, EVEN_K, PDL
    )
    if BIAS:
        low += tl.load(bias + n).to(tl.float32)[:, None]
        high += tl.load(bias + n + HEAD // 2).to(tl.float32)[:, None]
    kind = x.dtype.element_ty
    low, high = low.to(kind), high.to(kind)
    is_q = head < num_heads
    if head < num_heads + num_kv_heads:
        position = tl.load(positions + t, mask=t_ok, other=0).to(tl.int64)
        turn = position[None, :] * (HEAD // 2) + d[:, None]
        c = tl.load(cos + turn, mask=t_ok[None, :], other=0.0)
        s = tl.load(sin + turn, mask=t_ok[None, :], other=0.0)
        turned_low, turned_high = rotated(low.to(tl.float32), high.to(tl.float32), c, s)
        low, high = turned_low.to(kind), turned_high.to(kind)
    slot = tl.load(slots + t, mask=t_ok, other=0)
    if is_q:
        at = query + (t[None, :].to(tl.int64) * num_heads + head) * HEAD + d[:, None]
    elif head < num_heads + num_kv_heads:
        at = keys + (slot[None, :] * num_kv_heads + head - num_heads) * HEAD + d[:, None]
    else:
        at = values + (slot[None, :] * num_kv_heads + head - num_heads - num_kv_heads) * HEAD + d[:, None]
    tl.store(at, low, mask=t_ok[None, :])
    tl.store(at + HEAD // 2, high, mask=t_ok[None, :])


class Place(NamedTuple):
    """Where the tokens of a pass stand: rotation tables float32 [positions, D / 2], positions int32 [T],
    slots int64 [T], and one layer's caches [blocks, block, Hkv, D]."""

    rope: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    keys: Tensor
    values: Tensor


def can_fuse(num_rows: int, head_dim: int, norms: tuple[Tensor | None, Tensor | None]) -> bool:
    """Whether `run_qkv` does it: a norm over the head needs all of it in one program."""
    return num_rows <= FUSED_ROWS and head_dim % 32 == 0 and norms == (None, None)


def run_qkv(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    place: Place,
    pdl: bool,
    tile: Tile | None = None,
) -> Tensor:
    """q, k and v of normed rows x [T, K], rotated; k and v go to the caches. Returns q [T, Hq, D]."""
    num_rows, width = rows.x.shape
    num_kv_heads, head_dim = place.keys.shape[-2:]
    num_all = num_heads + 2 * num_kv_heads
    if weight.shape != (num_all * head_dim, width) or not weight.is_contiguous():
        raise ValueError(f"weight {tuple(weight.shape)} is not that of {num_all} heads of {head_dim}")
    _check_place(place, num_rows)
    query = torch.empty((num_rows, num_heads, head_dim), dtype=rows.x.dtype, device=rows.x.device)
    if tile is None:
        tile = qkv_tile(rows.x.element_size())
    _qkv_kernel[(num_all * (head_dim // 2 // tile.BN), triton.cdiv(num_rows, tile.BT))](
        rows.x,
        rows.x.stride(0),
        rows.eps,
        weight,
        bias,
        *place.rope,
        place.positions,
        place.slots,
        query,
        place.keys,
        place.values,
        num_rows,
        width,
        num_heads,
        num_kv_heads,
        BIAS=bias is not None,
        HEAD=head_dim,
        EVEN_K=width % tile.BK == 0,
        PDL=pdl,
        BN=tile.BN,
        BT=tile.BT,
        BK=tile.BK,
        **launch(pdl, tile.num_warps, tile.num_stages),
    )
    return query


def run_rope_store(
    qkv: Tensor,
    num_heads: int,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    place: Place,
    pdl: bool,
) -> Tensor:
    """Norms where given, rotates and stores qkv [T, (Hq + 2 Hkv) D] of one layer; or, with caches
    [layers, blocks, block, Hkv, D], those of several side by side, k_norm then [layers, D].

    Returns q [T, Hq, D]; Hq may be 0.
    """
    num_rows = qkv.shape[0]
    layers = place.keys.shape[0] if place.keys.dim() == 5 else 1
    num_kv_heads, head_dim = place.keys.shape[-2:]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    check_rows("qkv", qkv, layers * width)
    _check_place(place, num_rows)
    if head_dim % 2:
        raise ValueError(f"head size {head_dim} is odd")
    query = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return query
    _rope_store_kernel[(num_rows, layers)](
        qkv,
        qkv.stride(0),
        width,
        norms[0],
        norms[1],
        eps,
        *place.rope,
        place.positions,
        place.slots,
        query,
        place.keys,
        place.values,
        place.keys.stride(0) if layers > 1 else 0,
        num_heads,
        num_kv_heads,
        HEAD=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        HEADS=triton.next_power_of_2(num_heads + 2 * num_kv_heads),
        Q_NORM=norms[0] is not None,
        K_NORM=norms[1] is not None,
        PDL=pdl,
        **launch(pdl),
    )
    return query


def _check_place(place: Place, num_rows: int) -> None:
    for name in ("positions", "slots"):
        index: Tensor = getattr(place, name)
        expected = torch.int32 if name == "positions" else torch.int64
        if index.shape != (num_rows,) or index.dtype != expected or not index.is_contiguous():
            raise ValueError(f"{name} is {index.dtype} {tuple(index.shape)} for {num_rows} rows")
    for name, cache in (("keys", place.keys), ("values", place.values)):
        if not cache.is_contiguous() or cache.shape != place.keys.shape:
            raise ValueError(f"the cache of {name} is {tuple(cache.shape)} with strides {cache.stride()}")
