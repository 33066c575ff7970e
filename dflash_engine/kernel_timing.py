"""Checks a kernel against its reference, and only then times it, beside the ceilings of the same device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_engine.kernel_cases import Case
from dflash_engine.ops import Ops, ReferenceOps

TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""RMS of the error over RMS of the reference: one rounding to bfloat16 is 1.7e-3."""
CHECKED_ROWS = 32
COPY_BYTES = 1 << 30
MATMUL = 8192
MOST_COPIES = 64


@dataclass(frozen=True, slots=True)
class Check:
    """How a kernel compares with its reference."""

    error: float
    """RMS of the error over RMS of the reference, over a sample of rows."""
    rows_alone: bool
    """Whether rows come out alone, and in other company, as among all, to the bit."""
    passed: bool


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches, measured."""

    bytes_per_s: float
    """Read plus written by an addition of one to a vector."""
    flops_per_s: float
    """Of a large matrix product in the vendor's library."""

    def least_s(self, case: Case) -> float:
        return max(case.num_bytes / self.bytes_per_s, case.num_flops / self.flops_per_s)


def check(case: Case, ops: Ops, dtype: torch.dtype, device: torch.device) -> Check:
    """Compares a sample of rows with the reference, and rows alone with the same among all."""
    every = torch.arange(case.rows, device=device)
    sample = every[:: -(-case.rows // CHECKED_ROWS)]
    call = case.build(ops)
    together = call(every)
    if case.judge is not None:
        expected, found = case.judge(together[sample], sample)
    else:
        expected, found = case.build(ReferenceOps(16))(sample), together[sample]
    error = _rms(found.double() - expected.double()) / max(_rms(expected.double()), 1e-30)
    company = (every[-1:], every[:1], sample, every[1::2] if case.rows > 1 else every)
    alone = all(torch.equal(call(rows), together[rows]) for rows in company)
    passed = alone and error <= TOLERANCE[dtype]  # a NaN is no less than anything
    return Check(error, alone, passed)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def ceilings(device: torch.device, repeats: int) -> Ceilings:
    x = torch.ones(COPY_BYTES // 4, device=device)
    y = torch.empty_like(x)
    copied = time_s([lambda: torch.add(x, 1.0, out=y)], repeats)
    a, b = (torch.randn(MATMUL, MATMUL, device=device).bfloat16() for _ in range(2))
    multiplied = time_s([lambda: a @ b], repeats)
    return Ceilings(2 * COPY_BYTES / copied, 2 * MATMUL**3 / multiplied)


def kernel_s(case: Case, ops: Ops, device: torch.device, repeats: int) -> float:
    calls = []
    for _ in range(_copies(case, device)):
        call = case.build(ops)
        calls.append(lambda call=call: call(None))
    return time_s(calls, repeats)


def plain_s(case: Case, device: torch.device, repeats: int) -> float | None:
    if case.plain is None:
        return None
    return time_s([case.plain() for _ in range(_copies(case, device))], repeats)


def _copies(case: Case, device: torch.device) -> int:
    """Enough tensors that none is in the cache when its turn comes again, as in a model's layers."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_COPIES, -(-4 * cache // case.num_bytes)))


def time_s(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Median seconds of one of the calls, all of them captured in one graph. Needs a CUDA device."""
    seconds: list[float] = []
    with torch.inference_mode():
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(seconds)
