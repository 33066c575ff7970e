"""RMSNorm of rows by itself, for a matrix that two norms share, such as the head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.products import check_rows, empty_rows, launch, start_early, wait_for_inputs


@triton.jit
def _rms_norm_kernel(x, x_stride, weight, out, eps, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t] = x[t] / rms(x[t]) * weight, one row a program."""
    start_early(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    row = tl.load(x + t * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / K + eps)
    result = row * scale * tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out + t * K + k, result.to(out.dtype.element_ty), mask=k < K)


def run_rms_norm(x: Tensor, weight: Tensor, eps: float, pdl: bool) -> Tensor:
    """x [T, K] normed by weight [K], in x's type. Raises `ValueError` for shapes that do not fit."""
    num, width = x.shape
    check_rows("x", x, width)
    if weight.shape != (width,):
        raise ValueError(f"norm is {tuple(weight.shape)} for rows of {width}")
    out = empty_rows(num, width, x)
    if num:
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(num,)](
            x, x.stride(0), weight, out, eps, width, BLOCK=block, PDL=pdl, **launch(pdl, 8)
        )
    return out
