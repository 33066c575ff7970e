"""The seam to the kernels: the only module that imports them, and the place where they are chosen."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_engine.errors import ConfigError

try:
    from kernels.cpu import BuildError, CpuOps
    from kernels.reference import ReferenceOps
except ModuleNotFoundError as error:
    raise ImportError(
        "the PyPI package 'kernels' hides this project's kernels/ folder: pip uninstall kernels"
    ) from error

logger = logging.getLogger(__name__)

Weight = Any
"""A weight in the form that the same Ops' `pack` made of it."""


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

    def pack(self, weight: Tensor) -> Weight:
        """[N, K] -> the form that `linear` and `logits` take."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """x [T, K] -> [T, N] in float32."""

    def argmax(self, logits: Tensor) -> list[int]:
        """The first best token of each row of float32 [T, V]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """Norm of x [T, H]; with a residual [T, H], adds x to it in place and norms the sum."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> silu(first half) * second half, [T, I]."""

    def rope_store(
        self,
        qkv: Tensor,
        num_heads: int,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """Norms (where given) and rotates q and k of qkv [T, (Hq + 2 Hkv) D], and writes k and v.

        rope is cos and sin, float32 [positions, D / 2]; positions int32 [T]; slots int64 [T] into the
        caches [blocks, block, Hkv, D]. Returns q [T, Hq, D]; Hq may be 0.
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
    ) -> Tensor:
        """Row t attends to positions begin[t] <= p < end[t] of sequence row_seq[t].

        query [T, Hq, D]; tables int32 [sequences, blocks]; row_seq, begin, end int32 [T], rows of one
        sequence side by side. Returns [T, Hq D].
        """


def choose_ops(name: str, device: torch.device, dtype: torch.dtype, threads: int, shapes: Sizes) -> Ops:
    """The operations for a device and a model's sizes.

    Raises `ConfigError` where the ones asked for cannot work here.
    """
    if name == "reference" or device.type != "cpu":
        if name == "cpu":
            raise ConfigError(f"ops 'cpu' cannot compute on {device}; use ops 'auto'")
        return _reference(device, dtype, shapes)
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
    return _reference(device, dtype, shapes)


def _reference(device: torch.device, dtype: torch.dtype, shapes: Sizes) -> Ops:
    """Plain torch in the tiles in which rows do not depend on each other here: 16 rows, or else one."""
    for ops in (ReferenceOps(16), ReferenceOps(1)):
        if all(_rows_stand_alone(ops, device, dtype, shape) for shape in sorted(set(shapes.linears))):
            return ops
    raise ConfigError(f"torch's matmul on {device} gives a row other results from call to call")


def _rows_stand_alone(
    ops: ReferenceOps, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> bool:
    """Whether each row comes out the same alone as among others, at each place of a tile."""
    noise = torch.Generator().manual_seed(0)
    weight = ops.pack(torch.randn(shape, generator=noise).to(device, dtype))
    rows = torch.randn(ops.tile + 1, shape[1], generator=noise).to(device, dtype)
    together = ops.linear(rows, weight)
    alone = torch.cat([ops.linear(row, weight) for row in rows.split(1)])
    return torch.equal(together, alone)
