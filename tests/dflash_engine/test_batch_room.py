"""How much of a round batch may have beside online rows."""

from __future__ import annotations

import math
import random

import pytest

from dflash_engine.batch_room import BatchShare, RoundSize
from dflash_engine.observed_times import ObservedTimes
from dflash_engine.step_times import StepTimes

MOST = RoundSize(512, 64, 64)


def seconds(times: StepTimes, size: RoundSize, draft_rows: int, with_context: bool) -> float:
    passes = times.verify(size.num_tokens) + times.draft(draft_rows)
    return passes + (times.context(size.num_tokens) if with_context else 0.0)


def random_times(rng: random.Random) -> StepTimes:
    def rising(sizes: list[int]) -> dict[int, float]:
        second, table = rng.uniform(0.5, 2), {}
        for size in sizes:
            second *= rng.choice([1.0, 1.01, 1.05, 1.3])
            table[size] = second
        return table

    sizes = [*sorted(rng.sample(range(1, 500), 12)), 512]
    host = (rng.choice([0.0, 0.5]), rng.choice([0.0, 0.05]))
    return StepTimes(rising(sizes), rising([1, 4, 16, 64]), rising(sizes), *host)


@pytest.mark.parametrize("seed", range(40))
def test_the_round_is_the_largest_that_keeps_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    times, slowdown, with_context = random_times(rng), rng.choice([1.0, 1.1, 1.5]), rng.random() < 0.7
    rows = rng.randint(1, 8)
    online = RoundSize(rows + rng.randint(0, 90), rows, rng.randint(0, rows))
    found = BatchShare(times, slowdown).largest(online, MOST, with_context=with_context)
    drafting = online.num_drafting
    alone_s = max(seconds(times, online, drafting, with_context), times.floor(rows))
    limit_s = slowdown * alone_s + 1e-9
    fits = [
        size
        for size in range(online.num_tokens, 513)
        if seconds(times, RoundSize(size, 0, 0), drafting, with_context) <= limit_s
    ]
    assert found.num_tokens == max(fits, default=online.num_tokens)
    assert times.floor(found.num_rows) <= max(limit_s, times.floor(rows))
    assert found.num_rows == 64 or times.floor(found.num_rows + 1) > limit_s - 2e-9
    assert times.draft(found.num_drafting) == times.draft(drafting)
    assert found.num_drafting == 64 or times.draft(found.num_drafting + 1) > times.draft(drafting)


def test_where_online_does_not_draft_batch_does_not_either() -> None:
    share = BatchShare(random_times(random.Random(1)), 2.0)
    assert share.largest(RoundSize(3, 3, 0), MOST, with_context=True).num_drafting == 0


@pytest.mark.parametrize(("slowdown", "rounds"), [(1.1, 10), (1.5, 2), (2.0, 1), (3.0, 1), (1.0, math.inf)])
def test_rounds_of_batch_alone_come_as_seldom_as_keeps_the_mean(slowdown: float, rounds: float) -> None:
    assert BatchShare(ObservedTimes(), slowdown).rounds_between == rounds


def test_by_observed_times_batch_has_what_costs_a_tenth_more() -> None:
    times = ObservedTimes()
    for num_tokens in (1, 8, 64, 8, 128, 1):
        times.observe_round(num_tokens, 1, 0, True, 0.020 + 0.001 * num_tokens)
    found = BatchShare(times, 1.1).largest(RoundSize(8, 1, 1), MOST, with_context=True)
    assert found == RoundSize(10, 64, 64)  # 28 ms and a tenth: two tokens of 1 ms
