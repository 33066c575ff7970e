"""The seam to the kernels: the only module that imports them, and the place where they are chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_engine.errors import ConfigError
from dflash_engine.self_test import GPU_ROWS, gpu_pieces, rows_stand_alone

try:
    from kernels.accept import AcceptRows, accept
    from kernels.attention import SPLIT as ATTENTION_SPLIT
    from kernels.attention import tokens_per_tile
    from kernels.cpu import BuildError, CpuOps
    from kernels.noise import request_key
    from kernels.parallel_ops import Group, ParallelOps, ParallelReferenceOps
    from kernels.products import empty_rows
    from kernels.reference import ReferenceOps
    from kernels.rounds import (
        ANCHOR,
        DRAFTED,
        Choices,
        DraftBlocks,
        Feed,
        PlanRows,
        SlotState,
        run_choices,
        run_draft_feed,
        run_feed,
        run_update_tables,
    )
    from kernels.sampling import MAX_BIAS, WHOLE, SamplingTable, choose, reset_history
    from kernels.sampling_reference import choose_reference
    from kernels.triton_ops import Tiling, TritonOps, source_digest
    from kernels.vendor_ops import VendorOps
except ModuleNotFoundError as error:
    raise ImportError(
        "the PyPI package 'kernels' hides this project's kernels/ folder: pip uninstall kernels"
    ) from error

__all__ = [
    "ANCHOR",
    "ATTENTION_SPLIT",
    "DEVICE_OPS",
    "DRAFTED",
    "MAX_BIAS",
    "WHOLE",
    "AcceptRows",
    "Choices",
    "DraftBlocks",
    "Feed",
    "Group",
    "Noise",
    "Ops",
    "PlanRows",
    "ReferenceOps",
    "SamplingTable",
    "Sizes",
    "SlotState",
    "Tiling",
    "TritonOps",
    "Weight",
    "accept",
    "choose",
    "choose_ops",
    "choose_reference",
    "empty_rows",
    "request_key",
    "reset_history",
    "run_choices",
    "run_draft_feed",
    "run_feed",
    "run_update_tables",
    "source_digest",
    "tokens_per_tile",
]

logger = logging.getLogger(__name__)

Weight = Any
"""A weight in the form that the same Ops' `pack` made of it."""

Noise = tuple[Tensor, Tensor, Tensor, Tensor]
"""slots int32 [T] and positions int32 [T] of rows, temperature float32 [S] and key int64 [S] by slot."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the models will ask of their operations."""

    linears: tuple[tuple[int, int], ...]
    """[N, K] of each weight."""
    head_dims: tuple[int, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Row widths in and between the operations."""
        return tuple(sorted({width for _, width in self.linears}))


class Ops(Protocol):
    """Everything that the models compute. Rows first; T rows a step.

    A row's result is the same to the bit whatever other rows are in the call, and how many.
    """

    name: str
    version: str

    def pack(self, weight: Tensor, norm: Tensor | None = None) -> Weight:
        """[N, K] -> the form that the linears take; may use up `weight`. norm [K] is that of the rows which
        it will be multiplied with, given to the same linear again."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Weight) -> Tensor:
        """Norm of x [T, H] through the head -> [T, V] in float32."""

    def argmax(self, logits: Tensor) -> list[int]:
        """The first best token of each row of float32 [T, V]."""

    def best(self, x: Tensor, norm: Tensor, eps: float, weight: Weight, noise: Noise | None) -> Tensor:
        """int32 [T]: the first best token of each row of x [T, H], norm and head included, after the
        row's noise is added where it has a temperature."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [T, H]."""

    def qkv(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: Weight,
        bias: Tensor | None,
        num_heads: int,
        norms: tuple[Tensor | None, Tensor | None],
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """Norm of residual [T, H], then its q, k and v [(Hq + 2 Hkv) D], normed where `norms` are given,
        q and k rotated; k and v are written to the caches [blocks, block, Hkv, D].

        rope is cos and sin, float32 [positions, D / 2]; positions int32 [T]; slots int64 [T]. Returns
        q [T, Hq, D].
        """

    def attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: Tensor,
        row_seq: Tensor,
        begin: Tensor,
        end: Tensor,
        tiling: Any = None,
    ) -> Tensor:
        """Row t attends to positions begin[t] <= p < end[t] of sequence row_seq[t].

        query [T, Hq, D]; tables int32 [sequences, blocks]; row_seq, begin, end int32 [T], rows of one
        sequence side by side; tiling: `Tiling` of the same rows, which only GPUs need. Returns [T, Hq D].
        """

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Weight, bias: Tensor | None, tap: Tensor | None = None
    ) -> None:
        """Adds the linear of x [T, K] to residual [T, H] in place; `tap` [T, H] gets a copy of the sum."""

    def gate_up(
        self, residual: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        """Norm of residual [T, H], then silu(gate) * up, [T, I]; weight [2 I, H], gate first."""

    def pack_experts(self, matrices: Iterable[Tensor], num: int) -> Weight:
        """`num` matrices [N, K], taken one at a time, in the form that `experts` takes."""

    def experts(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Weight,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        renormalise: bool,
        tap: Tensor | None,
    ) -> None:
        """Adds to residual [T, H] in place, for the norm of each row, the weighted outputs of its `top_k`
        best experts of E; `tap` [T, H] gets a copy of the sum.

        router [E, H] from `pack`: softmax over all experts; of equals the lower id comes first; with
        `renormalise` the chosen weights are scaled to a sum of 1. gate_up E times [2 I, H] and down E
        times [H, I] from `pack_experts`.
        """

    def context(
        self,
        features: Tensor,
        fc: Weight,
        norm: Tensor,
        eps: float,
        kv: Weight,
        bias: Tensor | None,
        k_norms: Tensor,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_caches: Tensor,
        v_caches: Tensor,
    ) -> None:
        """Features [T, F] through fc and norm, then k and v of every draft layer, side by side; k normed by
        k_norms [layers, D] and rotated; all written to the caches [layers, blocks, block, Hkv, D]."""


DEVICE_OPS = frozenset({"triton", "vendor"})
"""Names of operations that choose on the device, so that rounds can be launched ahead."""


def choose_ops(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    shapes: Sizes,
    *,
    exact: bool = True,
    group: Group | None = None,
) -> Ops:
    """The operations for a device and a model's sizes; not `exact`: the fastest there are on a GPU.

    With a group they add up what its ranks compute, and the sizes are those of one rank's share. Raises
    `ConfigError` where the ones asked for cannot work here.
    """
    if name == "cpu" and device.type != "cpu":
        raise ConfigError(f"ops 'cpu' cannot compute on {device}; use ops 'auto'")
    if name == "reference":
        return _reference(device, dtype, shapes, group)
    if name == "triton" or device.type != "cpu":
        if TritonOps.supports(shapes.widths, shapes.head_dims):
            return _on_gpu(device, dtype, shapes, exact, group)
        problem = f"the GPU kernels do not cover widths {shapes.widths}, head sizes {shapes.head_dims}"
        if name == "triton":
            raise ConfigError(f"{problem}; use ops 'auto'")
        logger.warning("%s; computing with plain torch, many times slower", problem)
        return _reference(device, dtype, shapes, group)
    assert group is None, "the CPU kernels compute whole models"
    if not CpuOps.supports(shapes.widths, shapes.head_dims):
        problem = (
            f"the compiled CPU kernels do not cover widths {shapes.widths}, head sizes {shapes.head_dims}"
        )
    else:
        try:
            return CpuOps(threads)
        except BuildError as error:
            problem = f"the CPU kernels cannot be compiled: {error}"
    if name == "cpu":
        raise ConfigError(f"{problem}; use ops 'auto'")
    logger.warning("%s; computing with plain torch, several times slower", problem)
    return _reference(device, dtype, shapes, None)


def _on_gpu(device: torch.device, dtype: torch.dtype, shapes: Sizes, exact: bool, group: Group | None) -> Ops:
    """The GPU kernels; that a row does not depend on the tile it is in is a property of the GPU."""
    if not exact:
        assert group is None, "the vendor's products are not added up"
        return VendorOps(device, min(shapes.widths))
    width = min(shapes.widths)
    ops = TritonOps(device, width) if group is None else ParallelOps(device, group, width)
    for shape in sorted(set(shapes.linears)) if device.type == "cuda" else ():
        if not rows_stand_alone(ops, device, dtype, shape, GPU_ROWS, gpu_pieces()):
            raise ConfigError(
                f"{torch.cuda.get_device_name(device)} gives a row of a product {list(shape)} other bits in "
                "other tiles, so the GPU kernels are not exact on it: use ops reference, or exact: false"
            )
    return ops


def _reference(device: torch.device, dtype: torch.dtype, shapes: Sizes, group: Group | None) -> Ops:
    """Plain torch in the tiles in which rows do not depend on each other here: 16 rows, or else one."""
    # Parts of sums are computed in float32, whatever the model's type.
    dtypes = {dtype} if group is None else {dtype, torch.float32}
    for tile in (16, 1):
        ops = ReferenceOps(tile)
        if all(
            rows_stand_alone(
                ops, device, each, shape, tile + 1, [slice(row, row + 1) for row in range(tile + 1)]
            )
            for shape in sorted(set(shapes.linears))
            for each in dtypes
        ):
            return ops if group is None else ParallelReferenceOps(group, tile)
    raise ConfigError(f"torch's matmul on {device} gives a row other results from call to call")
