"""The check that a device computes rows alone as it does among others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_engine.ops import TritonOps
from dflash_engine.self_test import GPU_ROWS, GPU_SIZES, gpu_pieces, rows_stand_alone

CPU = torch.device("cpu")


class Steady:
    """Each row by itself, except that calls of some sizes are off by the last bit."""

    def __init__(self, *wrong: int) -> None:
        self._wrong = wrong

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        out = (x.double() @ weight.double().T).float()
        return torch.nextafter(out, torch.tensor(torch.inf)) if len(x) in self._wrong else out


def test_rows_that_come_out_the_same_in_every_number_stand_alone() -> None:
    assert rows_stand_alone(Steady(), CPU, torch.float32, (8, 16), GPU_ROWS, gpu_pieces())


def test_one_number_of_rows_with_another_last_bit_is_found() -> None:
    for size in GPU_SIZES:
        assert not rows_stand_alone(Steady(size), CPU, torch.float32, (8, 16), GPU_ROWS, gpu_pieces())


def test_the_gpu_kernels_pass_it_in_the_interpreter() -> None:
    pieces = [slice(0, 1), slice(3, 20), slice(39, 40)]
    assert rows_stand_alone(TritonOps(CPU), CPU, torch.bfloat16, (48, 64), 40, pieces)
