"""The compiled CPU operations against the reference, their rows against each other, and what they refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kernels.cpu import CpuOps
from kernels.reference import ReferenceOps
from tests.helpers import assert_close
from tests.kernels import cases

RATIO = {torch.float32: 2e-6, torch.bfloat16: 3e-3}
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_operation_agrees_with_the_reference(threads: int, dtype: torch.dtype, rows: int) -> None:
    ops, reference = CpuOps(threads), ReferenceOps()
    for name, case, num in cases.every_case(dtype, rows):
        chosen = torch.arange(num)
        assert_close(name, case(reference, chosen), case(ops, chosen), RATIO[dtype])


@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_to_the_bit_in_any_company(threads: int, dtype: torch.dtype, rows: int) -> None:
    cases.assert_rows_stand_alone(CpuOps(threads), dtype, rows)


@pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    for name, case, num in cases.every_case(dtype, 63):
        chosen = torch.arange(num)
        one, two, many = (case(CpuOps(threads), chosen) for threads in (1, 2, 5))
        assert torch.equal(one, two) and torch.equal(one, many), name


def test_logits_keep_the_precision_of_the_sum() -> None:
    """In bf16 two tokens that differ by less than 2^-8 of their size would be equals."""
    case = cases.linear(BF16, 9, 323, 576, head=True)
    chosen = torch.arange(9)
    assert_close("logits", case(cases.FormulaOps(), chosen), case(CpuOps(1), chosen), 2e-6)


def test_no_rows_give_no_rows() -> None:
    ops = CpuOps(2)
    weight = ops.pack(cases.noise(1, 40, 32, dtype=BF16))
    assert ops.linear(torch.zeros(0, 32, dtype=BF16), weight).shape == (0, 40)
    assert ops.wide_linear(torch.zeros(0, 32, dtype=BF16), weight).shape == (0, 40)


@pytest.mark.parametrize("outputs", [64, 63])
def test_a_sum_is_rounded_to_bf16_once_and_halves_to_even(outputs: int) -> None:
    """Whole panels are stored as vectors, the outputs of the last part of one singly."""
    numbers = 1 + torch.arange(outputs) / 128
    addends = torch.tensor([[0, 1], [1, 2**-8], [-1, -(2**-8)], [1, 3 * 2**-10], [1, 2**-8 + 2**-16]])
    x = torch.stack([addends[:, 0].where(addends[:, 0] != 0, 1), addends[:, 1]], dim=1).to(BF16)
    weight = torch.stack([numbers, torch.ones(outputs)], dim=1).to(BF16)
    exact = x.double() @ weight.double().T
    ties = (exact.float() != exact.to(BF16).float()).sum()
    assert ties > outputs
    assert torch.equal(_linear(x, weight), exact.to(BF16))


def test_calls_from_many_threads_at_once_do_not_mix() -> None:
    ops = CpuOps(2)
    jobs = [
        cases.linear(BF16, 3, 999, 64),
        cases.linear(F32, 17, 96, 128, bias=True),
        cases.silu_mul(F32, 40, 48),
        cases.rms_norm(BF16, 63, 64),
        cases.rope_store(F32, 30, 4, 2, 16, normed=True, strided=True),
        cases.attention(BF16, 4, 2, 16),
    ]
    rows = [3, 17, 40, 63, 30, 63]
    expected = [job(ops, torch.arange(num)) for job, num in zip(jobs, rows, strict=True)]

    def work(index: int) -> bool:
        which = index % len(jobs)
        return torch.equal(jobs[which](ops, torch.arange(rows[which])), expected[which])

    with ThreadPoolExecutor(6) as callers:
        assert all(callers.map(work, range(1200)))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    ops = CpuOps(1)
    return ops.linear(x, ops.pack(weight), bias)


def _rope_store(**changes: Any) -> torch.Tensor:
    cache = torch.zeros(2, 8, 1, 16)
    arguments: dict[str, Any] = {
        "qkv": torch.zeros(3, 48),
        "num_heads": 1,
        "norms": (None, None),
        "eps": 1e-5,
        "rope": (torch.zeros(9, 8), torch.zeros(9, 8)),
        "positions": torch.zeros(3, dtype=torch.int32),
        "slots": torch.arange(3),
        "k_cache": cache,
        "v_cache": cache.clone(),
    }
    return CpuOps(1).rope_store(**(arguments | changes))


def _attention(**changes: Any) -> torch.Tensor:
    index = torch.zeros(3, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "query": torch.zeros(3, 2, 16),
        "k_cache": torch.zeros(2, 8, 1, 16),
        "v_cache": torch.zeros(2, 8, 1, 16),
        "tables": torch.zeros(1, 1, dtype=torch.int32),
        "row_seq": index,
        "begin": index,
        "end": index + 1,
    }
    return CpuOps(1).attention(**(arguments | changes))


REFUSED = {
    "linear: other width": lambda: _linear(torch.zeros(2, 32), torch.zeros(8, 16)),
    "linear: other dtype": lambda: _linear(torch.zeros(2, 16), torch.zeros(8, 16, dtype=BF16)),
    "linear: bias of another dtype": lambda: _linear(
        torch.zeros(2, 16), torch.zeros(8, 16), torch.zeros(8, dtype=BF16)
    ),
    "linear: bias too short": lambda: _linear(torch.zeros(2, 16), torch.zeros(8, 16), torch.zeros(7)),
    "linear: strided": lambda: _linear(torch.zeros(2, 32)[:, ::2], torch.zeros(8, 16)),
    "linear: float16": lambda: _linear(
        torch.zeros(2, 16, dtype=torch.float16), torch.zeros(8, 16, dtype=torch.float16)
    ),
    "rms_norm: strided": lambda: CpuOps(1).rms_norm(torch.zeros(16, 2).T, torch.ones(16), 1e-5),
    "rms_norm: part of a vector": lambda: CpuOps(1).rms_norm(torch.zeros(2, 24), torch.ones(24), 1e-5),
    "rms_norm: weight too short": lambda: CpuOps(1).rms_norm(torch.zeros(2, 32), torch.ones(16), 1e-5),
    "silu_mul: part of a vector": lambda: CpuOps(1).silu_mul(torch.zeros(2, 48)),
    "silu_mul: strided": lambda: CpuOps(1).silu_mul(torch.zeros(2, 64)[:, ::2]),
    "rope_store: width is not that of the heads": lambda: _rope_store(qkv=torch.zeros(3, 64)),
    "rope_store: qkv across its columns": lambda: _rope_store(qkv=torch.zeros(48, 3).T),
    "rope_store: caches of another dtype": lambda: _rope_store(
        k_cache=torch.zeros(2, 8, 1, 16, dtype=BF16), v_cache=torch.zeros(2, 8, 1, 16, dtype=BF16)
    ),
    "rope_store: 64-bit positions": lambda: _rope_store(positions=torch.zeros(3, dtype=torch.int64)),
    "rope_store: 32-bit slots": lambda: _rope_store(slots=torch.arange(3, dtype=torch.int32)),
    "rope_store: too few positions": lambda: _rope_store(positions=torch.zeros(2, dtype=torch.int32)),
    "rope_store: head size of no kernel": lambda: _rope_store(
        qkv=torch.zeros(3, 72),
        k_cache=torch.zeros(2, 8, 1, 24),
        v_cache=torch.zeros(2, 8, 1, 24),
        rope=(torch.zeros(9, 12), torch.zeros(9, 12)),
    ),
    "rope_store: table of another head size": lambda: _rope_store(rope=(torch.zeros(9, 4),) * 2),
    "attention: head size of no kernel": lambda: _attention(
        query=torch.zeros(3, 2, 48), k_cache=torch.zeros(2, 8, 1, 48), v_cache=torch.zeros(2, 8, 1, 48)
    ),
    "attention: cache of another head size": lambda: _attention(
        k_cache=torch.zeros(2, 8, 1, 32), v_cache=torch.zeros(2, 8, 1, 32)
    ),
    "attention: heads do not share evenly": lambda: _attention(
        query=torch.zeros(3, 3, 16), k_cache=torch.zeros(2, 8, 2, 16), v_cache=torch.zeros(2, 8, 2, 16)
    ),
    "attention: 64-bit tables": lambda: _attention(tables=torch.zeros(1, 1, dtype=torch.int64)),
    "attention: cache of another dtype": lambda: _attention(k_cache=torch.zeros(2, 8, 1, 16, dtype=BF16)),
    "attention: too few ranges": lambda: _attention(end=torch.ones(2, dtype=torch.int32)),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_would_misread_is_refused(call: Any) -> None:
    with pytest.raises(ValueError):
        call()


def test_the_calls_that_refusals_change_one_thing_of_are_good() -> None:
    assert _rope_store().shape == (3, 1, 16)
    assert _attention().shape == (3, 32)
