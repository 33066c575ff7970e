"""The reference operations against their definitions, and their rows against each other."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import ReferenceOps
from tests.helpers import assert_close
from tests.kernels import cases

RATIO = {torch.float32: 2e-6, torch.bfloat16: 3e-3}


TILES = [(16, rows) for rows in cases.ROWS] + [(1, 9)]


@pytest.mark.parametrize(("tile", "rows"), TILES)
@pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
def test_every_operation_computes_its_definition(dtype: torch.dtype, tile: int, rows: int) -> None:
    ops, formula = ReferenceOps(tile), cases.FormulaOps()
    for name, case, num in cases.every_case(dtype, rows):
        chosen = torch.arange(num)
        assert_close(name, case(formula, chosen), case(ops, chosen), RATIO[dtype])


@pytest.mark.parametrize(("tile", "rows"), TILES)
@pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
def test_a_row_is_the_same_to_the_bit_in_any_company(dtype: torch.dtype, tile: int, rows: int) -> None:
    cases.assert_rows_stand_alone(ReferenceOps(tile), dtype, rows)


def test_a_row_is_the_same_in_any_company_where_torch_has_threads() -> None:
    torch.set_num_threads(2)
    cases.assert_rows_stand_alone(ReferenceOps(), torch.float32, 17)


@pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
def test_attention_in_tiles_of_one_row_computes_its_definition(dtype: torch.dtype) -> None:
    case, chosen = cases.attention(dtype, 4, 2, 16, window=20), torch.arange(63)
    assert_close("attention", case(cases.FormulaOps(), chosen), case(ReferenceOps(1), chosen), RATIO[dtype])


@pytest.mark.parametrize("inner", [72, 1536])
def test_a_row_of_silu_does_not_depend_on_where_torch_splits_its_work(inner: int) -> None:
    """torch shares an elementwise call out in pieces that may begin anywhere inside a row."""
    rows = 140_000 // inner
    case = cases.silu_mul(torch.float32, rows, inner)
    torch.set_num_threads(5)
    ops = ReferenceOps()
    together = case(ops, torch.arange(rows))
    alone = torch.cat([case(ops, torch.tensor([row])) for row in range(rows)])
    assert torch.equal(together, alone)
