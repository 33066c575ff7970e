"""What an engine keeps from one start to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_engine.gpu_building import step_times
from dflash_engine.step_times import StepTimes, TimesKey

KEY = TimesKey("model", "gpu", "1")


class Measuring:
    """Counts how often it has to measure."""

    def __init__(self) -> None:
        self.num = 0

    def measure(self) -> StepTimes:
        self.num += 1
        return StepTimes({1: 0.1 * self.num}, {1: 0.2}, {1: 0.3})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))


def test_times_are_measured_once_for_a_model_gpu_and_version() -> None:
    first, again, other = Measuring(), Measuring(), Measuring()
    assert step_times(first, KEY).verify(1) == step_times(again, KEY).verify(1) == pytest.approx(0.1)
    step_times(other, TimesKey("model", "another", "1"))
    assert (first.num, again.num, other.num) == (1, 0, 1)


def test_times_that_are_not_worth_keeping_are_measured_each_time() -> None:
    measuring = Measuring()
    step_times(measuring, None)
    step_times(measuring, None)
    assert measuring.num == 2
