"""Whether a device's matrix products are exact: each row the same alone as among others, to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

MOST_OUTPUTS = 32_768
"""Of a larger matrix, such as the head, this many rows are tried."""
GPU_ROWS = 1_100
GPU_SIZES = (1, 16, 17, 60, 200, 500)
"""Numbers of rows for which the GPU kernels take different tiles."""


class Linears(Protocol):
    def pack(self, weight: Tensor) -> Any: ...
    def linear(self, x: Tensor, weight: Any) -> Tensor: ...


def rows_stand_alone(
    ops: Linears,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    num_rows: int,
    pieces: Iterable[slice],
) -> bool:
    """Whether random rows through a random [N, K] come out the same in each piece as all together."""
    noise = torch.Generator(device).manual_seed(0)
    outputs, width = min(shape[0], MOST_OUTPUTS), shape[1]
    weight = ops.pack(torch.randn((outputs, width), generator=noise, device=device).to(dtype))
    rows = torch.randn((num_rows, width), generator=noise, device=device).to(dtype)
    together = ops.linear(rows, weight)
    return all(torch.equal(ops.linear(rows[piece], weight), together[piece]) for piece in pieces)


def gpu_pieces() -> list[slice]:
    """The first and the last rows, in every number that matters."""
    return [piece for size in GPU_SIZES for piece in (slice(0, size), slice(GPU_ROWS - size, GPU_ROWS))]
