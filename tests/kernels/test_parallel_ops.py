"""Sums over ranks: one order whatever happens, and the kernel has the reference's bits.

Kernels run in Triton's interpreter, or on the GPU where there is one. Four ranks: with two, an order and its
reverse give the same sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.parallel_ops import ParallelOps, ParallelReferenceOps, add_partials, run_add_partials
from kernels.reference import ReferenceOps
from tests.helpers import assert_close
from tests.kernels.test_experts import Mixture

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, F32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
TOLERANCE = {F32: 2e-6, BF16: 1e-2}
"""RMS ratios; in bfloat16 a rounding is 1.7e-3, and the whole sum's place in it differs."""
SIZE, WIDTH = 4, 48


class Replay:
    """A rank's view of a group whose other ranks have spoken already."""

    def __init__(self, rank: int, spoken: list[Tensor]) -> None:
        self.rank = rank
        self.size = SIZE
        self._spoken = spoken

    def all_gather(self, part: Tensor) -> Tensor:
        assert part.dtype == F32 and part.is_contiguous()
        parts = list(self._spoken)
        parts[self.rank] = part
        return torch.stack(parts)


class Recorder:
    """A rank that is only asked for its part."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.size = SIZE
        self.part = torch.empty(0)

    def all_gather(self, part: Tensor) -> Tensor:
        self.part = part.clone()
        return torch.zeros(SIZE, *part.shape, device=part.device)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "triton": lambda group: ParallelOps(DEVICE, group),
    "reference": ParallelReferenceOps,
}


def noise(seed: int, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(DEVICE, dtype)


def on_all_ranks(name: str, call: Callable[[Any, int], Tensor]) -> list[Tensor]:
    """What `call` gives with the operations of each rank, all parts exchanged."""
    recorders = [Recorder(rank) for rank in range(SIZE)]
    for recorder in recorders:
        call(MAKERS[name](recorder), recorder.rank)
    spoken = [recorder.part for recorder in recorders]
    return [call(MAKERS[name](Replay(rank, spoken)), rank) for rank in range(SIZE)]


ORDERED = torch.tensor([2.0**24, 1.0, 1.0, 1.0], device=DEVICE)
"""In float32 2^24 + 1 is 2^24 again, so the sum from the left is 2^24, and from the right 2^24 + 4."""


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_ranks_are_added_from_the_first_one_on(name: str) -> None:
    add = run_add_partials if name == "triton" else None
    sums = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [0, 3, 1, 2]):
        partials = ORDERED[order].view(SIZE, 1, 1).expand(SIZE, 3, WIDTH).contiguous()
        by_hand = 0.0
        for value in ORDERED[order].tolist():
            by_hand = float(torch.tensor(by_hand + value, dtype=torch.float64).float())
        residual = torch.zeros(3, WIDTH, device=DEVICE)
        if add is not None:
            add(partials, residual, None, None, False)
        else:
            add_partials(partials, residual, None, None)
        assert residual.unique().tolist() == [by_hand], order
        sums.append(by_hand)
    assert sums[:2] == [2.0**24, 2.0**24 + 4]


@DTYPES
@pytest.mark.parametrize("tapped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_kernel_has_the_bits_of_the_reference(dtype: torch.dtype, tapped: bool, biased: bool) -> None:
    for size, rows, width in ((2, 1, 1023), (3, 2, 1024), (4, 3, 1025), (8, 5, 16)):
        partials = noise(1, size, rows, width)
        bias = noise(2, width, dtype=dtype) if biased else None
        # Rows that stand apart, as those of a slice do.
        residual = noise(3, rows, width + 8, dtype=dtype)[:, :width]
        expected = residual.clone()
        taps = torch.full((2, rows, 2 * width), torch.nan, dtype=dtype, device=DEVICE)[..., :width]
        add_partials(partials, expected, bias, taps[0] if tapped else None)
        run_add_partials(partials, residual, bias, taps[1] if tapped else None, False)
        assert not tapped or (torch.equal(taps[0], expected) and torch.equal(taps[1], residual))
        if dtype == F32 or DEVICE.type == "cuda":  # the interpreter cuts bfloat16 off unrounded
            assert torch.equal(residual, expected)
        exact = partials.double().sum(0) + noise(3, rows, width + 8, dtype=dtype)[:, :width].double()
        exact = exact + bias.double() if bias is not None else exact
        assert_close(f"{size} ranks", exact.to(dtype), residual, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partials": torch.zeros(4, 3, 8)}, "partials are"),
        ({"partials": torch.zeros(4, 2, 16)[:, :, ::2]}, "partials are .* strides"),
        ({"partials": torch.zeros(4, 2, 8, dtype=BF16)}, "not float32"),
        ({"bias": torch.zeros(7)}, "bias is"),
        ({"tap": torch.zeros(3, 8)}, "tap has 3 rows"),
        ({"residual": torch.zeros(8, 2).T}, "residual is"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Tensor], message: str) -> None:
    call = {
        "partials": torch.zeros(4, 2, 8),
        "residual": torch.zeros(2, 8),
        "bias": None,
        "tap": None,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        run_add_partials(**call, pdl=False)


@DTYPES
@pytest.mark.parametrize("name", MAKERS)
def test_a_divided_linear_is_the_whole_one_on_every_rank(name: str, dtype: torch.dtype) -> None:
    inner, rows = 64, 19
    weight, bias = noise(1, WIDTH, inner, dtype=dtype, scale=inner**-0.5), noise(2, WIDTH, dtype=dtype)
    x, residual = noise(3, rows, inner, dtype=dtype), noise(4, rows, WIDTH, dtype=dtype)

    def call(which: slice, ops: Any, rank: int) -> Tensor:
        part = slice(rank * inner // SIZE, (rank + 1) * inner // SIZE)
        total, tap = residual[which].clone(), torch.full_like(residual[which], torch.nan)
        mine = ops.pack(weight[:, part].contiguous())
        ops.add_linear(total, x[which, part].contiguous(), mine, bias, tap)
        assert torch.equal(total, tap)
        return total

    first, *others = on_all_ranks(name, partial(call, slice(rows)))
    assert all(torch.equal(first, other) for other in others)
    whole = residual.double() + x.double() @ weight.double().T + bias.double()
    assert_close(name, whole.to(dtype), first, TOLERANCE[dtype])
    for row in (0, 7, 18):
        alone = on_all_ranks(name, partial(call, slice(row, row + 1)))
        assert torch.equal(alone[0], first[row : row + 1]), "a row depends on others"


@DTYPES
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_divided_experts_are_the_whole_ones_on_every_rank(name: str, dtype: torch.dtype) -> None:
    inner, hidden = 64, WIDTH
    mixture = Mixture.make(dtype, hidden=hidden, inner=inner)
    residual = noise(9, 9, hidden, dtype=dtype)

    def call(ops: Any, rank: int) -> Tensor:
        part = slice(rank * inner // SIZE, (rank + 1) * inner // SIZE)
        gate, up = mixture.gate_up.chunk(2, dim=1)
        mine = mixture._replace(
            gate_up=torch.cat([gate[:, part], up[:, part]], dim=1),
            down=mixture.down[:, :, part].contiguous(),
        )
        return mine.run(ops, residual)

    first, *others = on_all_ranks(name, call)
    assert all(torch.equal(first, other) for other in others)
    assert_close(name, mixture.formula(residual), first, 2 * {F32: 2e-6, BF16: 2e-2}[dtype])
    if name == "reference":
        whole = mixture.run(ReferenceOps(), residual)
        assert_close("the undivided operations", whole, first, 2 * TOLERANCE[dtype])
