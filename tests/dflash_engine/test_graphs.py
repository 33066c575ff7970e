"""Each run does a function's work once, called or replayed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from dflash_engine.graphs import Graphs


class Adder:
    """Adds a number to a tensor that stays in place, by way of memory of its own; counts its calls."""

    def __init__(self, device: torch.device, size: int = 3) -> None:
        self.total: Tensor = torch.zeros(size, dtype=torch.int64, device=device)
        self.step = torch.ones(size, dtype=torch.int64, device=device)
        self.num_calls = 0

    def add(self, times: int = 1) -> None:
        self.num_calls += 1
        for _ in range(times):
            passing = torch.zeros_like(self.total) + self.step
            self.total.add_(passing)


@pytest.mark.parametrize("enabled", [True, False])
def test_on_a_cpu_functions_are_called(enabled: bool):
    device = torch.device("cpu")
    graphs, adder = Graphs(device, enabled=enabled), Adder(device)
    for _ in range(3):
        graphs.run("add", adder.add)
    assert adder.num_calls == 3 and len(graphs) == 0
    assert adder.total.tolist() == [3, 3, 3]


def test_what_is_met_once_is_not_captured(monkeypatch: pytest.MonkeyPatch):
    device = torch.device("cpu")
    graphs, adder = Graphs(device), Adder(device)
    captured: list[str] = []

    class Replayed:
        def replay(self) -> None:
            captured.append("replay")

    def capture(function: object) -> Replayed:
        captured.append("capture")
        return Replayed()

    monkeypatch.setattr(graphs, "_enabled", True)
    monkeypatch.setattr(graphs, "_capture", capture)
    graphs.run("once", adder.add)
    assert adder.num_calls == 1 and not captured
    for _ in range(3):
        graphs.run("often", adder.add)
    assert adder.num_calls == 2 and captured == ["capture", "replay", "replay"] and len(graphs) == 1


@pytest.mark.gpu
def test_on_a_gpu_a_function_is_called_for_its_first_run_and_for_the_capture_in_its_second():
    device = torch.device("cuda")
    graphs, adder = Graphs(device), Adder(device)
    for runs in range(1, 6):
        graphs.run("add", adder.add)
        assert adder.total.tolist() == [runs] * 3, "one run adds once"
        assert adder.num_calls == min(runs, 2) and len(graphs) == min(runs - 1, 1)


@pytest.mark.gpu
def test_graphs_switched_off_are_calls():
    device = torch.device("cuda")
    graphs, adder = Graphs(device, enabled=False), Adder(device)
    for _ in range(3):
        graphs.run("add", adder.add)
    assert adder.num_calls == 3 and len(graphs) == 0 and adder.total.tolist() == [3, 3, 3]


@pytest.mark.gpu
def test_graphs_share_their_memory_and_nothing_else():
    """Several keys in any order, some met while others' work is still queued; inputs change in place."""
    device = torch.device("cuda")
    graphs = Graphs(device)
    adders = [Adder(device, size) for size in (3, 1000, 1_000_000)]
    expected = [0, 0, 0]
    order = [0, 1, 0, 2, 2, 1, 0, 0, 2, 1, 1, 2, 0]
    for at, which in enumerate(order):
        adders[which].step.fill_(at)
        graphs.run((which, 1 + which), partial(adders[which].add, 1 + which))
        expected[which] += at * (1 + which)
    for adder, total in zip(adders, expected, strict=True):
        assert adder.total.unique().tolist() == [total]
    assert len(graphs) == 3


@pytest.mark.gpu
def test_a_function_that_fails_in_its_capture_raises_and_leaves_the_others_usable():
    device = torch.device("cuda")
    graphs, adder = Graphs(device), Adder(device)
    for _ in range(2):
        graphs.run("add", adder.add)
    calls: list[int] = []

    def breaks() -> None:
        calls.append(1)
        adder.add()
        if len(calls) == 2:
            raise ZeroDivisionError

    graphs.run("breaks", breaks)
    with pytest.raises(ZeroDivisionError):
        graphs.run("breaks", breaks)
    for _ in range(2):
        graphs.run("add", adder.add)
    assert adder.total.tolist() == [5, 5, 5]
