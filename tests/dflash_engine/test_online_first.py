"""What batch rows may take of a step, and what online rows never notice of them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from dflash_engine.acceptance import Acceptance
from dflash_engine.batch_room import BatchShare, RoundSize
from dflash_engine.draft_policy import DraftPolicy
from dflash_engine.plan import RowPlan
from dflash_engine.request import Priority, SamplingParams
from dflash_engine.scheduler import Scheduler
from dflash_engine.step_budget import PromptLimit
from dflash_engine.step_times import StepTimes
from tests.dflash_engine.schedules import add, commit, fed, plan, scheduler, step, tight

SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
SLOWDOWN = 1.1


def gpu_times(token_s: float = 0.004) -> StepTimes:
    """A pass of one token takes 1, and each further one a little."""
    passes = {size: 1 + token_s * size for size in SIZES}
    small = {size: 0.1 + 0.002 * size for size in SIZES}
    return StepTimes(passes, small, small, host_s=0.1, host_row_s=0.001)


def crowded(times: StepTimes, **changes: Any) -> Scheduler:
    share = BatchShare(times, SLOWDOWN)
    sizes = {"num_blocks": 800, "max_num_seqs": 32, "max_step_tokens": 256, "block_length": 8}
    return scheduler(**{**sizes, "share": share, **changes})


def online_part(rows: dict[int, RowPlan]) -> dict[int, tuple[int, int]]:
    return {seq_id: each for seq_id, each in fed(rows).items() if seq_id < 100}


def round_s(times: StepTimes, rows: list[RowPlan]) -> float:
    tokens = sum(row.num_tokens + row.num_draft for row in rows)
    drafting = sum(row.num_draft > 0 for row in rows)
    passes = times.verify(tokens) + times.context(tokens) + times.draft(drafting)
    return max(passes, times.floor(len(rows)))


def many_steps(times: StepTimes, num_batch: int, seed: int) -> tuple[list[Any], list[dict[int, RowPlan]]]:
    """Online requests that come and go, with or without batch: what each step does for them."""
    rng = random.Random(seed)
    policy = DraftPolicy(times, Acceptance(7), 8)
    engine = crowded(times, draft_policy=policy, prompt_limit=PromptLimit(40), max_model_len=600)
    # One goes on all the time: where batch is alone, the policy counts its rounds too.
    add(engine, 50, 3, max_tokens=500, priority=Priority.ONLINE)
    for number in range(num_batch):
        engine.add(100 + number, (number,) * (1 + number % 40), 20, SamplingParams(), 0, Priority.BATCH)
    seen, steps = [], []
    for online in range(12):
        add(engine, online, 1 + rng.randint(0, 30), max_tokens=25, priority=Priority.ONLINE)
        for _ in range(rng.randint(1, 9)):
            rows, accepted = plan(engine), rng.randint(0, 3)
            most = {i: len(row.output) + 1 + min(accepted, row.num_draft) for i, row in rows.items()}
            ended = tuple(i for i, num in most.items() if num >= 20 and i != 50 and rows[i].sample)
            commit(engine, rows, accepted, ended)
            seen.append(online_part(rows))
            steps.append(rows)
    return seen, steps


@pytest.mark.parametrize("seed", range(4))
def test_online_rows_do_in_each_step_what_they_would_do_without_batch(seed: int) -> None:
    alone, _ = many_steps(gpu_times(), 0, seed)
    beside, steps = many_steps(gpu_times(), 200, seed)
    assert beside == alone
    assert any(num_draft for each in alone for _, num_draft in each.values())
    assert sum(len(rows) for rows in steps) > 2 * sum(map(len, alone)), "batch did next to nothing"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("token_s", [0.002, 0.008, 0.2])
def test_batch_lengthens_no_step_of_online_by_more_than_it_may(token_s: float, seed: int) -> None:
    times = gpu_times(token_s)
    _, steps = many_steps(times, 200, seed)
    worst = 0.0
    for rows in steps:
        online = [row for seq_id, row in rows.items() if seq_id < 100]
        if online:
            worst = max(worst, round_s(times, list(rows.values())) / round_s(times, online))
    assert worst <= SLOWDOWN + 1e-9
    assert worst > 1.001 or token_s > 0.1


def test_prompts_of_batch_leave_the_limit_for_prompts_to_online() -> None:
    engine = scheduler(prompt_limit=PromptLimit(11), share=BatchShare(gpu_times(0.0), 3.0), max_num_seqs=20)
    add(engine, 1, 5, priority=Priority.ONLINE)
    step(engine)
    for seq_id in range(10, 22):
        add(engine, seq_id, 8)
    assert sum(num for seq_id, (num, _) in fed(step(engine)).items() if seq_id >= 10) == 10
    add(engine, 2, 7, priority=Priority.ONLINE)
    rows = fed(step(engine))
    # Those of batch that have begun to decode are no prompts.
    assert rows[2] == (7, 0) and sum(num for i, (num, _) in rows.items() if i >= 10 and num > 1) <= 3


def test_batch_rows_take_turns_where_not_all_find_room() -> None:
    share = BatchShare(gpu_times(), 1.05)
    engine = scheduler(block_length=1, max_num_seqs=20, num_blocks=400, share=share, max_step_tokens=256)
    for seq_id in range(10, 26):
        add(engine, seq_id, 1, max_tokens=60)
    step(engine)
    add(engine, 1, 5, max_tokens=60, priority=Priority.ONLINE)
    step(engine)
    counts = dict.fromkeys(range(10, 26), 0)
    for _ in range(16):
        rows = step(engine)
        assert 1 in rows and 2 <= len(rows) < 17
        for seq_id in set(rows) - {1}:
            counts[seq_id] += 1
    assert max(counts.values()) - min(counts.values()) <= 1 and min(counts.values()) >= 1


def test_online_takes_blocks_for_its_draft_from_batch_after_the_round_in_flight() -> None:
    engine = tight(num_blocks=18, rounds_ahead=1, max_model_len=60)
    add(engine, 1, 4, max_tokens=40, priority=Priority.ONLINE)
    rows = plan(engine)
    commit(engine, rows)
    add(engine, 2, 24, max_tokens=36)
    add(engine, 3, 24, max_tokens=36)
    lengths: list[int] = []
    in_flight: list[dict[int, RowPlan]] = []
    while len(lengths) < 8:
        made = engine.plan()
        if made is not None:
            rows = {row.seq_id: row for row in made.rows}
            in_flight.append(rows)
            lengths.append(rows[1].num_draft)
        if made is None or len(in_flight) > 1:
            commit(engine, in_flight.pop(0), accepted=1)
    assert engine.stats().preemptions >= 1
    assert lengths.count(0) <= 1


@pytest.mark.parametrize("on_host", [Priority.ONLINE, Priority.BATCH])
def test_batch_rows_that_cannot_share_a_step_with_online_have_every_tenth(on_host: Priority) -> None:
    engine = crowded(gpu_times(), rounds_ahead=1, block_length=1)
    host, plain = SamplingParams(logprobs=0), SamplingParams()
    for seq_id in range(10, 30):
        sampling = host if on_host is Priority.BATCH else plain
        engine.add(seq_id, (1, 2), 60, sampling, 0, Priority.BATCH)
    sampling = host if on_host is Priority.ONLINE else plain
    engine.add(1, (1, 2), 60, sampling, 0, Priority.ONLINE)
    steps = [step(engine) for _ in range(44)]
    with_batch = [at for at, rows in enumerate(steps) if 1 not in rows]
    assert with_batch == [10, 21, 32, 43]
    assert all(1 < len(steps[at]) <= 20 for at in with_batch)


def starving(clock: list[float], **changes: Any) -> Scheduler:
    """Online fills every step, and nothing is left for batch."""
    limits = {"batch_starvation_s": 5.0, "clock": lambda: clock[0], "share": BatchShare(gpu_times(), 1.0)}
    sizes = {"max_step_tokens": 2, "max_num_seqs": 3, "block_length": 1}
    engine = scheduler(**{**limits, **sizes, **changes})
    for seq_id in (1, 2):
        add(engine, seq_id, 1, max_tokens=60, priority=Priority.ONLINE)
    return engine


def test_without_a_bound_batch_stands_still_as_long_as_online_leaves_nothing() -> None:
    engine = starving([0.0], batch_starvation_s=None)
    add(engine, 9, 1)
    assert all(set(step(engine)) == {1, 2} for _ in range(50))


def test_batch_that_waited_for_too_long_has_one_token_and_then_waits_again() -> None:
    now = [0.0]
    engine = starving(now)
    add(engine, 9, 1)
    moved = []
    for tick in range(36):
        now[0] = 0.5 * tick
        if 9 in step(engine):
            moved.append(now[0])
    assert moved[0] == 5.0
    assert len(moved) >= 3
    assert all(5.0 <= later - sooner <= 6.0 for sooner, later in itertools.pairwise(moved))


def test_of_a_backlog_of_batch_only_the_first_is_let_in() -> None:
    now = [0.0]
    engine = starving(now, max_num_seqs=4)
    for seq_id in (7, 8, 9):
        add(engine, seq_id, 1)
    seen: set[int] = set()
    for tick in range(14):
        now[0] = 0.5 * tick
        seen |= set(step(engine))
    assert seen == {1, 2, 7}


def test_a_promoted_sequence_may_end_or_be_aborted() -> None:
    for ends_by in ("finish", "abort"):
        now = [0.0]
        engine = starving(now)
        add(engine, 9, 3)
        step(engine)
        now[0] = 6.0
        rows = plan(engine)
        assert 9 in rows and not rows[9].sample
        commit(engine, rows)
        if ends_by == "abort":
            engine.abort(9)
        else:
            while not (rows := plan(engine)).get(9) or not rows[9].sample:
                commit(engine, rows)
            commit(engine, rows, finished=(9,))
        engine.check_integrity()
        assert set(step(engine)) == {1, 2}


def test_a_step_of_batch_alone_is_not_bounded() -> None:
    engine = crowded(gpu_times())
    for seq_id in range(10, 30):
        add(engine, seq_id, 12)
    assert sum(num for num, _ in fed(step(engine)).values()) == 20 * 12
    assert all(num_draft == 7 for _, num_draft in fed(step(engine)).values())


def test_what_a_step_holds_is_counted() -> None:
    largest = BatchShare(gpu_times(), SLOWDOWN).largest(
        RoundSize(9, 2, 1), RoundSize(256, 32, 32), with_context=True
    )
    assert largest.num_tokens >= 16, "what fills up a measured size is free"
