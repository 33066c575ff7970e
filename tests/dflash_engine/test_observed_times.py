"""Times of rounds learned from the rounds that ran."""

from __future__ import annotations

import random

import pytest

from dflash_engine.observed_times import MOST_SURPRISE, ObservedTimes


def observe(times: ObservedTimes, num_tokens: int, seconds: float) -> None:
    times.observe_round(num_tokens, 1, 0, True, seconds)


def test_a_straight_line_is_found_through_noise() -> None:
    rng, times = random.Random(1), ObservedTimes()
    for _ in range(300):
        size = rng.randint(1, 200)
        observe(times, size, (0.03 + 0.0005 * size) * rng.uniform(0.9, 1.1))
    for size in (1, 20, 100, 200):
        assert times.verify(size) == pytest.approx(0.03 + 0.0005 * size, rel=0.1)


def test_rounds_of_one_size_say_only_what_a_token_of_them_costs() -> None:
    times = ObservedTimes()
    for _ in range(5):
        observe(times, 8, 0.04)
    assert times.verify(8) == pytest.approx(0.04) and times.verify(16) == pytest.approx(0.08)


def test_it_follows_when_all_rounds_become_slower() -> None:
    times = ObservedTimes()
    for factor in (1.0, 3.0):
        for step in range(400):
            size = 1 + step % 50
            observe(times, size, factor * (0.01 + 0.001 * size))
    assert times.verify(10) == pytest.approx(0.06, rel=0.02)


def test_one_hiccup_counts_as_a_bounded_surprise_and_a_clock_set_back_not_at_all() -> None:
    times = ObservedTimes()
    for step in range(100):
        observe(times, 1 + step % 20, 0.01)
    observe(times, 10, 60.0)
    assert times.verify(10) < 0.01 * (1 + 0.05 * MOST_SURPRISE)
    before = times.verify(10)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        observe(times, 10, seconds)
    assert times.verify(10) == before


def test_more_tokens_never_count_as_cheaper() -> None:
    times = ObservedTimes()
    for step in range(50):
        observe(times, 1 + step % 20, 1.0 / (1 + step % 20))
    assert times.verify(20) >= times.verify(1) > 0
