"""Matrix products with one order of reduction, whatever the number of rows: the body that all linears share.

A tile is out^T[n, t] = sum over k of W[n, k] x[t, k], one chain of tensor-core steps along k for each
output. On Hopper that chain gives the same bits in every tile size, for mma.sync and for wgmma and with
operands exchanged (measured, kernels' tests repeat it), so tiles follow the number of rows, but k is
never split.

RMSNorm is part of the product: the norm's weights are multiplied into W when it is packed, and the sum is
scaled by 1 / rms(x) at its end. The sum of squares is the diagonal of x x^T, so it too is one chain of
tensor-core steps; for many rows `row_scales` makes the factors beforehand, with the same bits.

How many rows there are differs from round to round, here and in the other kernels, and is never compiled in
(but for a single one): a compilation in the middle of work would hold up everybody for a second.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.tiles import WIDE_ROWS, Tile

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SUM = tl.constexpr(tl.float64 if triton.knobs.runtime.interpret else tl.float32)
"""Type of running sums. The interpreter rounds once at the end: numpy's float32 sums depend on the shape."""
FUSED_NORM_ROWS = 16
"""With more rows, one kernel for their root mean squares costs less than every tile taking them."""
ROOM = 128
"""Rows of the largest tile."""


@triton.jit
def start_early(PDL: tl.constexpr):
    """Lets the next kernel of the stream be set up while this one runs."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Behind this, what earlier kernels wrote can be read; weights can be read before."""
    if PDL:
        gdc_wait()


@triton.jit
def dot(a, b, acc):
    """a @ b + acc, in full precision for float32 inputs; acc is of type SUM."""
    if INTERPRETED:  # it cannot multiply bfloat16
        return acc + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def diagonal(square, SIZE: tl.constexpr):
    """The diagonal of [SIZE, SIZE]; exact, since all other terms of the sums are zero."""
    at = tl.arange(0, SIZE)
    return tl.sum(tl.where(at[:, None] == at[None, :], square.to(tl.float32), 0.0), axis=0)


@triton.jit
def weights_at(w, n, n_ok, k, K, EVEN_K: tl.constexpr):
    """[BN, BK] of the weight [N, K]."""
    where = w + n[:, None].to(tl.int64) * K + k[None, :]
    if EVEN_K:
        return tl.load(where, mask=n_ok[:, None], other=0.0)
    return tl.load(where, mask=n_ok[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def rows_at(x, x_stride, t, t_ok, k, K, EVEN_K: tl.constexpr):
    """[BK, BT] of x [T, K], transposed."""
    where = x + t[None, :].to(tl.int64) * x_stride + k[:, None]
    if EVEN_K:
        return tl.load(where, mask=t_ok[None, :], other=0.0)
    return tl.load(where, mask=t_ok[None, :] & (k < K)[:, None], other=0.0)


@triton.jit
def products(
    x,
    x_stride,
    t,
    t_ok,
    scale,
    eps,
    w,
    n,
    second,
    n_ok,
    K,
    NORM: tl.constexpr,
    PAIR: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """float32 [BN, BT] of rows t of x with rows n of w, and with rows `second` of w (PAIR, else zeros).

    NORM 0: as they are; 1: divided by the rows' root mean squares; 2: times `scale` [T] of `row_scales`.
    """
    wait_for_inputs(PDL)
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BT), SUM)
    acc2 = tl.zeros((BN, BT), SUM)
    gram = tl.zeros((BT, BT), SUM)
    for start in range(0, K, BK):
        at = start + k
        rows = rows_at(x, x_stride, t, t_ok, at, K, EVEN_K)
        acc = dot(weights_at(w, n, n_ok, at, K, EVEN_K), rows, acc)
        if PAIR:
            acc2 = dot(weights_at(w, second, n_ok, at, K, EVEN_K), rows, acc2)
        if NORM == 1:
            gram = dot(tl.trans(rows), rows, gram)
    acc, acc2 = acc.to(tl.float32), acc2.to(tl.float32)
    if NORM == 1:
        factor = tl.rsqrt(diagonal(gram, BT) / K + eps)[None, :]
        acc *= factor
        acc2 *= factor
    if NORM == 2:
        factor = tl.load(scale + t, mask=t_ok, other=0.0)[None, :]
        acc *= factor
        acc2 *= factor
    return acc, acc2


@triton.jit(do_not_specialize_on_alignment=["T"])
def _row_scales_kernel(x, x_stride, scale, eps, T, K, BT: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """scale[t] = 1 / rms(x[t])."""
    start_early(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    k = tl.arange(0, BK)
    gram = tl.zeros((BT, BT), SUM)
    for start in range(0, K, BK):
        rows = rows_at(x, x_stride, t, t < T, start + k, K, False)
        gram = dot(tl.trans(rows), rows, gram)
    tl.store(scale + t, tl.rsqrt(diagonal(gram, BT) / K + eps), mask=t < T)


class Rows(NamedTuple):
    """Input of a product: rows x [T, K], and how its result is scaled."""

    x: Tensor
    mode: int
    """As NORM of `products`."""
    eps: float = 0.0
    scale: Tensor | None = None


def plain_rows(x: Tensor) -> Rows:
    return Rows(x, 0)


def normed_rows(x: Tensor, eps: float, pdl: bool) -> Rows:
    """x [T, K] for a weight that holds the norm's weights: root mean squares are taken in the product, or
    before it where the rows are many."""
    check_rows("x", x, x.shape[-1])
    return Rows(x, 1, eps) if len(x) <= FUSED_NORM_ROWS else Rows(x, 2, eps, row_scales(x, eps, pdl))


def row_scales(x: Tensor, eps: float, pdl: bool) -> Tensor:
    """1 / rms of each row of x [T, K], float32 [T]."""
    num, width = x.shape
    scale = torch.empty(num, dtype=torch.float32, device=x.device)
    _row_scales_kernel[(triton.cdiv(num, 16),)](
        x, x.stride(0), scale, eps, num, width, BT=16, BK=256, PDL=pdl, **launch(pdl)
    )
    return scale


def launch(pdl: bool, num_warps: int = 4, num_stages: int = 3) -> dict[str, int | bool]:
    """Launch options; programmatic dependent launch exists on Hopper and later."""
    options: dict[str, int | bool] = {"num_warps": num_warps, "num_stages": num_stages}
    return {**options, "launch_pdl": True} if pdl else options


def check_rows(name: str, x: Tensor, width: int) -> None:
    """Raises `ValueError` where x is not rows of this width, contiguous within a row."""
    if x.dim() != 2 or x.shape[1] != width or (width > 1 and x.stride(1) != 1):
        raise ValueError(
            f"{name} is {tuple(x.shape)} with strides {x.stride()}, not contiguous rows of {width}"
        )


@triton.jit
def wide_products(
    x,
    w,
    scale,
    t0,
    n0,
    second0,
    T,
    K,
    NORM: tl.constexpr,
    PAIR: tl.constexpr,
    FLIP: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `products`, for many rows: x [T, K] and w [N, K] are tensor descriptors, NORM is 0 or 2.

    FLIP: rows of x are the first operand, of which the tensor cores take 64 at a time, so BN may be less.
    """
    wait_for_inputs(PDL)
    if FLIP:
        acc = tl.zeros((BT, BN), SUM)
        acc2 = tl.zeros((BT, BN), SUM)
        for start in range(0, K, BK):
            rows = x.load([t0, start])
            acc = dot(rows, tl.trans(w.load([n0, start])), acc)
            if PAIR:
                acc2 = dot(rows, tl.trans(w.load([second0, start])), acc2)
        acc, acc2 = tl.trans(acc), tl.trans(acc2)
    else:
        acc = tl.zeros((BN, BT), SUM)
        acc2 = tl.zeros((BN, BT), SUM)
        for start in range(0, K, BK):
            rows = tl.trans(x.load([t0, start]))
            acc = dot(w.load([n0, start]), rows, acc)
            if PAIR:
                acc2 = dot(w.load([second0, start]), rows, acc2)
    acc, acc2 = acc.to(tl.float32), acc2.to(tl.float32)
    if NORM == 2:
        t = t0 + tl.arange(0, BT)
        factor = tl.load(scale + t, mask=t < T, other=0.0)[None, :]
        acc *= factor
        acc2 *= factor
    return acc, acc2


@triton.jit
def tile_of(T, N, BT: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """This program's tile (along n, along t): neighbours share rows and weights in the L2 cache."""
    pid = tl.program_id(0)
    tiles_t = tl.cdiv(T, BT)
    tiles_n = tl.cdiv(N, BN)
    per_group = GROUP * tiles_t
    first = pid // per_group * GROUP
    size = tl.minimum(tiles_n - first, GROUP)
    return first + pid % per_group % size, pid % per_group // size


def can_describe(x: Tensor, w: Tensor) -> bool:
    """Whether the hardware takes descriptors of x and w: whole rows of 16 bytes from a multiple of 16."""
    width = x.shape[1] * x.element_size()
    aligned = width % 16 == 0 and x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0
    return aligned and x.element_size() == 2 and x.is_contiguous() and len(x) > WIDE_ROWS


def empty_rows(num: int, width: int, like: Tensor) -> Tensor:
    """[num, width], and memory behind it for the rest of the last tile of any product that reads it."""
    room = triton.cdiv(num, ROOM) * ROOM
    return torch.empty((room, width), dtype=like.dtype, device=like.device)[:num]


def described(x: Tensor, w: Tensor, tile: Tile) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of x [T, K] and w [N, K] for `wide_products`.

    A tile that reaches beyond a descriptor is loaded up to twice as slowly (measured on an H200: 160 rows of
    12,288 in tiles of 128 took 101 us, and 47 within one). So x reaches to the end of its last tile where
    there is memory: what is read there meets no row that counts.
    """
    num, width = x.shape
    room = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // width
    rows = min(triton.cdiv(num, tile.BT) * tile.BT, room)
    return (
        TensorDescriptor(x, [rows, width], [width, 1], [tile.BT, tile.BK]),
        TensorDescriptor.from_tensor(w, [tile.BN, tile.BK]),
    )
