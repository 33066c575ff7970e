"""Linear layers on the GPU: plain, added to the residual, and gate-up with SiLU, norms included."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.products import (
    Rows,
    can_describe,
    check_rows,
    described,
    launch,
    products,
    start_early,
    tile_of,
    wide_products,
)
from kernels.tiles import Tile, small_tile, wide_tile

STORE, ADD, SILU = 0, 1, 2
_GROUP = 8


@triton.jit(do_not_specialize_on_alignment=["T"])
def _linear_kernel(
    x,
    x_stride,
    scale,
    eps,
    w,
    bias,
    out,
    out_stride,
    tap,
    tap_stride,
    T,
    N,
    K,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    TAP: tl.constexpr,
    WIDE: tl.constexpr,
    FLIP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [T, N] = y; out + y; or silu(y) * y2, with y = x W^T + bias, x divided by its
    rows' root mean squares where NORM says so; y2 of W's rows N to 2 N."""
    PAIR: tl.constexpr = EPILOGUE == 2
    start_early(PDL)
    tile_n, tile_t = tile_of(T, N, BT, BN, GROUP)
    n = tile_n * BN + tl.arange(0, BN)
    t = tile_t * BT + tl.arange(0, BT)
    if WIDE:
        acc, acc2 = wide_products(
            x, w, scale, tile_t * BT, tile_n * BN, N + tile_n * BN, T, K, NORM, PAIR, FLIP, BN, BT, BK, PDL
        )
    else:
        acc, acc2 = products(
            x, x_stride, t, t < T, scale, eps, w, n, N + n, n < N, K, NORM, PAIR, BN, BT, BK, EVEN_K, PDL
        )
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if PAIR:
            acc2 += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    inside = (n < N)[:, None] & (t < T)[None, :]
    where = out + t[None, :].to(tl.int64) * out_stride + n[:, None]
    if EPILOGUE == 2:
        acc = acc / (1.0 + tl.exp(-acc)) * acc2
    if EPILOGUE == 1:
        acc += tl.load(where, mask=inside, other=0.0).to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    tl.store(where, result, mask=inside)
    if TAP:
        tl.store(tap + t[None, :].to(tl.int64) * tap_stride + n[:, None], result, mask=inside)


def run_linear(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    epilogue: int,
    tap: Tensor | None,
    pdl: bool,
    tile: Tile | None = None,
) -> Tensor:
    """out [T, N] of x [T, K] and weight [N, K] (SILU: [2 N, K], gate first); see `_linear_kernel`.

    ADD adds to `out` in place, and writes the sum to `tap` [T, N] too where given. Raises `ValueError`
    for shapes that do not fit.
    """
    num_rows, width = rows.x.shape
    num_out = weight.shape[0] // (2 if epilogue == SILU else 1)
    check_rows("x", rows.x, width)
    check_rows("weight", weight, width)
    if not weight.is_contiguous():
        raise ValueError("weight is not contiguous")
    for name, tensor in (("out", out), ("tap", tap)):
        if tensor is not None:
            check_rows(name, tensor, num_out)
            if len(tensor) != num_rows:
                raise ValueError(f"{name} has {len(tensor)} rows, x {num_rows}")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias is {tuple(bias.shape)} for {weight.shape[0]} outputs")
    if num_rows == 0:
        return out
    size = rows.x.element_size()
    wide = can_describe(rows.x, weight)
    if tile is None:
        pair = epilogue == SILU
        if wide:
            tile = wide_tile(num_rows, num_out, width, pair=pair)
        else:
            tile = small_tile(num_rows, width, pair=pair, itemsize=size)
    x, w = described(rows.x, weight, tile) if wide else (rows.x, weight)
    grid = (triton.cdiv(num_out, tile.BN) * triton.cdiv(num_rows, tile.BT),)
    _linear_kernel[grid](
        x,
        rows.x.stride(0),
        rows.scale,
        rows.eps,
        w,
        bias,
        out,
        out.stride(0),
        tap,
        tap.stride(0) if tap is not None else 0,
        num_rows,
        num_out,
        width,
        NORM=rows.mode,
        BIAS=bias is not None,
        EPILOGUE=epilogue,
        TAP=tap is not None,
        WIDE=wide,
        FLIP=tile.flip,
        EVEN_K=width % tile.BK == 0,
        PDL=pdl,
        BN=tile.BN,
        BT=tile.BT,
        BK=tile.BK,
        GROUP=_GROUP,
        **launch(pdl, tile.num_warps, tile.num_stages),
    )
    return out
