"""Operations of one rank of several that share a model: each has a part of every sum, and all parts are
gathered and added in the order of the ranks, so that no choice of how they travel can change a bit."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts import run_experts
from kernels.linear import STORE, run_linear
from kernels.products import check_rows, launch, plain_rows, start_early, wait_for_inputs
from kernels.reference import PlainWeight, ReferenceOps
from kernels.triton_ops import TritonOps

_COLUMNS = 1024
"""Columns of one program."""


class Group(Protocol):
    """The ranks that share a model, as one of them sees it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Every rank's `part` [...], contiguous and of one shape, as [size, ...] in the order of the ranks.

        All ranks call it in the same order.
        """
        ...


def add_partials(partials: Tensor, residual: Tensor, bias: Tensor | None, tap: Tensor | None) -> None:
    """Adds float32 partials [size, T, H], summed from rank 0 on, and bias [H] to residual [T, H] in place,
    all in float32, rounded once; `tap` [T, H] gets a copy."""
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    if bias is not None:
        total += bias.float()
    residual.copy_(total + residual.float())
    if tap is not None:
        tap.copy_(residual)


@triton.jit
def _add_partials_kernel(
    partials,
    residual,
    residual_stride,
    bias,
    tap,
    tap_stride,
    T,
    N,
    SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    TAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual[t] = ((partials[0, t] + partials[1, t]) + ...) + bias + residual[t]; tap[t] the same."""
    start_early(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.load(partials + t * N + n, mask=n < N, other=0.0)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(partials + (t + rank * T) * N + n, mask=n < N, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    where = residual + t * residual_stride + n
    total += tl.load(where, mask=n < N, other=0.0).to(tl.float32)
    result = total.to(residual.dtype.element_ty)
    tl.store(where, result, mask=n < N)
    if TAP:
        tl.store(tap + t * tap_stride + n, result, mask=n < N)


def run_add_partials(
    partials: Tensor, residual: Tensor, bias: Tensor | None, tap: Tensor | None, pdl: bool
) -> None:
    """See `add_partials`. Raises `ValueError` for shapes and types that do not fit."""
    num_rows, width = residual.shape
    if partials.dim() != 3 or partials.shape[1:] != residual.shape or not partials.is_contiguous():
        raise ValueError(
            f"partials are {tuple(partials.shape)} with strides {partials.stride()} for a residual of "
            f"{tuple(residual.shape)}"
        )
    if partials.dtype != torch.float32:
        raise ValueError(f"partials are {partials.dtype}, not float32")
    for name, tensor in (("residual", residual), ("tap", tap)):
        if tensor is not None:
            check_rows(name, tensor, width)
            if len(tensor) != num_rows:
                raise ValueError(f"{name} has {len(tensor)} rows, residual {num_rows}")
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"bias is {tuple(bias.shape)} for rows of {width}")
    if num_rows == 0:
        return
    _add_partials_kernel[(num_rows, triton.cdiv(width, _COLUMNS))](
        partials,
        residual,
        residual.stride(0),
        bias,
        tap,
        tap.stride(0) if tap is not None else 0,
        num_rows,
        width,
        SIZE=len(partials),
        BIAS=bias is not None,
        TAP=tap is not None,
        COLUMNS=_COLUMNS,
        PDL=pdl,
        **launch(pdl),
    )


class ParallelOps(TritonOps):
    """The GPU's operations on one rank's share of the weights; see `dflash_engine.ops.Ops`.

    What `add_linear` and `experts` add has the columns of this rank's inputs only; their bias is whole.
    """

    def __init__(self, device: torch.device, group: Group, width: int = 0) -> None:
        super().__init__(device, width)
        self._group = group

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor | None = None
    ) -> None:
        partial = torch.empty(residual.shape, dtype=torch.float32, device=residual.device)
        run_linear(plain_rows(x), weight, None, partial, STORE, None, self._pdl)
        run_add_partials(self._group.all_gather(partial), residual, bias, tap, self._pdl)

    def experts(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        top_k: int,
        renormalise: bool,
        tap: Tensor | None,
    ) -> None:
        partial = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
        run_experts(
            residual, norm, eps, router, gate_up, down, top_k, renormalise, None, self._pdl, into=partial
        )
        run_add_partials(self._group.all_gather(partial), residual, None, tap, self._pdl)


class ParallelReferenceOps(ReferenceOps):
    """The same in plain torch, for any device."""

    def __init__(self, group: Group, tile: int = 16) -> None:
        super().__init__(tile)
        self._group = group

    def partial_linear(self, x: Tensor, weight: PlainWeight) -> Tensor:
        """This rank's part of the linear of x [T, K], float32 [T, N] that was never rounded."""
        matrix = weight.matrix.float()
        return self._by_tiles(lambda tile: F.linear(tile.float(), matrix), x)

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Any, bias: Tensor | None, tap: Tensor | None = None
    ) -> None:
        add_partials(self._group.all_gather(self.partial_linear(x, weight)), residual, bias, tap)

    def experts(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Any,
        gate_up: Any,
        down: Any,
        top_k: int,
        renormalise: bool,
        tap: Tensor | None,
    ) -> None:
        partial = self.sum_of_experts(residual, norm, eps, router, gate_up, down, top_k, renormalise)
        add_partials(self._group.all_gather(partial), residual, None, tap)
