"""Planning a round while an earlier one is in flight."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_engine.errors import ConfigError
from dflash_engine.plan import RowCommit, StepPlan
from dflash_engine.request import Priority, SamplingParams
from dflash_engine.scheduler import Scheduler
from tests.dflash_engine.schedules import NEXT, add, commit, plan, scheduler, step


def ahead(**changes: Any) -> Scheduler:
    return scheduler(rounds_ahead=1, **changes)


def give(engine: Scheduler, **kept: int) -> None:
    """Commits the oldest round: so many tokens for each sequence."""
    engine.commit([RowCommit(int(name[1:]), (NEXT,) * num, False) for name, num in kept.items()])
    engine.check_integrity()


def test_the_pool_must_hold_what_a_round_ahead_may_reach() -> None:
    with pytest.raises(ConfigError, match=r"may need 72 \(max_model_len 64 \+ 2 x block_length 4"):
        ahead(num_blocks=17)
    ahead(num_blocks=18)


def test_no_more_rounds_are_planned_than_may_be_ahead() -> None:
    engine = ahead()
    add(engine, 1, 6)
    plan(engine)
    plan(engine)
    with pytest.raises(AssertionError, match="2 plans are not committed"):
        engine.plan()


def test_a_row_behind_a_sample_in_flight_has_no_tokens_and_begins_at_the_least_possible_place() -> None:
    engine = ahead()
    add(engine, 1, 6)
    first, second = plan(engine)[1], plan(engine)[1]
    assert (first.start, len(first.tokens), first.ahead, first.num_draft) == (0, 6, False, 0)
    assert (second.start, second.tokens, second.ahead) == (6, (), True)
    assert (second.num_tokens, second.num_draft, second.sample) == (1, 3, True)
    give(engine, s1=1)
    third = plan(engine)[1]
    assert (third.start, third.ahead) == (7, True)
    give(engine, s1=4)
    fourth = plan(engine)[1]
    assert fourth.start == 6 + 4 + 1
    assert list(fourth.output) == [NEXT] * 5


def test_chunks_of_a_prompt_in_flight_are_followed_by_known_tokens() -> None:
    engine = ahead(max_step_tokens=4)
    add(engine, 1, 10)
    rows = [plan(engine)[1]]
    for kept in (0, 0, 1):
        rows.append(plan(engine)[1])
        give(engine, s1=kept)
    assert [(row.start, row.tokens, row.ahead, row.sample) for row in rows] == [
        (0, (100, 101, 102, 103), False, False),
        (4, (104, 105, 106, 107), False, False),
        (8, (108, 109), False, True),
        (10, (), True, True),
    ]


def test_a_row_ahead_has_room_wherever_it_may_begin() -> None:
    engine = ahead(block_size=1)
    add(engine, 1, 6)
    plan(engine)
    row = plan(engine)[1]
    assert len(row.block_table) == 6 + 4
    give(engine, s1=1)
    row = plan(engine)[1]
    assert row.start == 7 and len(row.block_table) == 7 + 3 + 4


def test_a_sequence_that_is_certain_to_end_gets_no_row() -> None:
    engine = ahead()
    add(engine, 1, 6, max_tokens=2)
    add(engine, 2, 6)
    assert set(plan(engine)) == {1, 2}
    assert plan(engine)[1].num_draft == 0
    give(engine, s1=1, s2=1)
    assert set(plan(engine)) == {2}


def test_nothing_is_drafted_that_is_certain_to_be_cut_off() -> None:
    engine = ahead()
    add(engine, 1, 6, max_tokens=5)
    plan(engine)
    assert plan(engine)[1].num_draft == 3
    give(engine, s1=1)
    assert plan(engine)[1].num_draft == 2


def test_rows_of_a_sequence_that_ended_meanwhile_are_thrown_away() -> None:
    engine = ahead()
    add(engine, 1, 6)
    add(engine, 2, 6)
    first, second = plan(engine), plan(engine)
    assert set(second) == {1, 2}
    commit(engine, first, finished=(1,))
    assert engine.stats().running == 1
    with pytest.raises(AssertionError, match="rows are not the plan's"):
        commit(engine, second)


def test_abort_frees_blocks_and_slot_at_once_also_in_flight() -> None:
    engine = ahead(max_num_seqs=1)
    add(engine, 1, 6)
    plan(engine)
    engine.abort(1)
    engine.check_integrity()
    assert engine.stats().free_blocks == 200
    add(engine, 2, 6)
    row = plan(engine)[2]
    assert (row.slot, row.ahead, row.start) == (0, False, 0)
    engine.commit([])
    give(engine, s2=1)
    assert engine.plan() is not None


def test_what_was_aborted_before_it_came_back_leaves_nothing_behind() -> None:
    engine = ahead()
    add(engine, 1, 6)
    plan(engine)
    plan(engine)
    engine.abort(1)
    engine.commit([])
    assert engine.plan() is None
    engine.commit([])
    engine.check_integrity()
    assert engine.plan() is None


def test_slots_are_held_while_running_and_the_lowest_free_one_is_taken() -> None:
    engine = ahead(max_num_seqs=3)
    for seq_id in (1, 2, 3):
        add(engine, seq_id, 6)
    assert [row.slot for row in plan(engine).values()] == [0, 1, 2]
    give(engine, s1=1, s2=1, s3=1)
    rows = plan(engine)
    assert [row.slot for row in rows.values()] == [0, 1, 2]
    commit(engine, rows, finished=(1, 2))
    for seq_id in (4, 5):
        add(engine, seq_id, 6)
    assert {i: row.slot for i, row in plan(engine).items()} == {3: 2, 4: 0, 5: 1}


def test_nobody_is_preempted_before_what_is_in_flight_has_come_back_and_no_round_goes_before_online() -> None:
    engine = ahead(max_num_seqs=2)
    add(engine, 1, 6)
    add(engine, 2, 6)
    plan(engine)
    add(engine, 3, 6, priority=Priority.ONLINE)
    assert engine.plan() is None
    assert engine.stats().preemptions == 0
    give(engine, s1=1, s2=1)
    assert set(plan(engine)) == {1, 3}
    assert engine.stats().preemptions == 1


def test_a_sequence_without_a_block_waits_for_the_rounds_in_flight_and_then_preempts() -> None:
    engine = ahead(num_blocks=10, max_model_len=32, block_length=1)
    add(engine, 1, 18)
    add(engine, 2, 15)
    before = plan(engine)
    while len(rows := plan(engine)) == 2:
        commit(engine, before)
        before = rows
    assert engine.stats().preemptions == 0
    commit(engine, before)
    assert engine.plan() is None
    commit(engine, rows)
    row = plan(engine)[1]
    assert not row.ahead and engine.stats().preemptions == 1


def hosted(engine: Scheduler, seq_id: int) -> None:
    sampling = SamplingParams(logprobs=1)
    engine.add(seq_id, tuple(range(100 * seq_id, 100 * seq_id + 6)), 20, sampling, 0, Priority.BATCH)


def test_sequences_that_need_the_host_have_steps_of_their_own_in_turn() -> None:
    engine = ahead()
    add(engine, 1, 6)
    hosted(engine, 2)
    add(engine, 3, 6)
    seen: list[tuple[bool, list[int]]] = []
    before: StepPlan | None = None
    for _ in range(8):
        each = engine.plan()
        assert each is not None
        seen.append((each.on_host, [row.seq_id for row in each.rows]))
        if before is not None:
            commit(engine, {row.seq_id: row for row in before.rows})
        before = each
        if each.on_host:
            assert not any(row.ahead for row in each.rows)
            commit(engine, {row.seq_id: row for row in each.rows})
            before = None
    # Sequence 3 does not overtake the second one, so it comes in only with its kind's second step.
    assert seen == [(False, [1]), (True, [2]), *[(False, [1, 3]), (True, [2])] * 3]


def test_a_runner_that_is_never_ahead_takes_all_kinds_together() -> None:
    engine = scheduler()
    add(engine, 1, 6)
    hosted(engine, 2)
    assert set(step(engine)) == {1, 2}


def test_a_plan_with_all_of_one_kind_takes_no_turns() -> None:
    engine = ahead()
    hosted(engine, 1)
    for _ in range(3):
        each = engine.plan()
        assert each is not None and each.on_host
        commit(engine, {row.seq_id: row for row in each.rows})
