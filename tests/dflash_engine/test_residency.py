"""Who runs and who waits: prefixes, preemption, and classes."""

from __future__ import annotations

import pytest

from dflash_engine.blocks import IntegrityError
from dflash_engine.request import Priority
from tests.dflash_engine.schedules import NEXT, add, fed, plan, scheduler, step, tight


def test_a_committed_prefix_is_found_by_the_next_sequence() -> None:
    engine = scheduler()
    prompt = tuple(range(10))
    add(engine, 1, prompt)
    step(engine)
    add(engine, 2, (*prompt[:8], 50, 51, 52))
    assert engine.cached_tokens(2) == 0
    rows = step(engine)
    assert engine.cached_tokens(1) == 0 and engine.cached_tokens(2) == 8
    assert (rows[2].start, rows[2].tokens) == (8, (50, 51, 52))
    assert rows[2].block_table[:2] == rows[1].block_table[:2]
    assert not set(rows[2].block_table[2:]) & set(rows[1].block_table)


def test_an_answer_is_a_prefix_for_the_next_turn() -> None:
    engine = scheduler()
    add(engine, 1, 6)
    step(engine)
    step(engine, accepted=3, finished=(1,))
    add(engine, 2, (*range(100, 106), NEXT, NEXT, NEXT, NEXT, NEXT, 50))
    step(engine)
    assert engine.cached_tokens(2) == 8


def test_of_a_wholly_cached_prompt_something_is_left_to_compute() -> None:
    engine = scheduler()
    prompt = tuple(range(8))
    add(engine, 1, prompt)
    step(engine)
    add(engine, 2, prompt)
    assert fed(step(engine))[2] == (4, 0)
    assert engine.cached_tokens(2) == 4


def test_without_prefix_caching_nothing_is_shared() -> None:
    engine = scheduler(prefix_caching=False)
    for seq_id in (1, 2):
        add(engine, seq_id, tuple(range(10)))
        rows = step(engine)
    assert engine.cached_tokens(2) == 0
    assert not set(rows[1].block_table) & set(rows[2].block_table)


def test_the_latest_is_preempted_when_blocks_run_out_and_resumes_from_the_cache() -> None:
    engine = tight(block_length=1)
    add(engine, 1, 16)
    add(engine, 2, 14)
    add(engine, 3, 1)
    rows = step(engine)
    while 2 in rows:
        last = rows
        rows = step(engine)
    assert engine.stats().preemptions == 1 and engine.stats().waiting == 2
    assert engine.stats().free_blocks + len(rows[1].block_table) == 10
    resumed = step(engine, finished=(1,)) and plan(engine)
    assert list(resumed) == [2, 3]
    assert resumed[2].start == 16 and resumed[2].tokens == (NEXT,) * len(resumed[2].tokens)
    assert resumed[2].output == last[2].output
    assert engine.cached_tokens(2) == 0


def test_a_draft_is_given_up_before_a_peer_is_preempted() -> None:
    engine = tight()
    add(engine, 1, 16)
    add(engine, 2, 14)
    step(engine)
    assert fed(step(engine)) == {1: (1, 3), 2: (1, 3)}
    assert engine.stats().free_blocks == 0
    assert fed(step(engine)) == {1: (1, 0), 2: (1, 3)}
    assert engine.stats().preemptions == 0


def test_admission_leaves_room_for_the_running_ones_to_grow() -> None:
    engine = tight()
    add(engine, 1, 16)
    step(engine)
    add(engine, 2, 24)  # six blocks: just what is free, but the first one needs another now
    assert set(step(engine)) == {1}
    step(engine, finished=(1,))
    assert set(step(engine)) == {2}
    assert engine.stats().preemptions == 0


def test_nobody_overtakes_the_first_in_the_queue() -> None:
    engine = tight()
    add(engine, 1, 16)
    step(engine)
    add(engine, 2, 24)
    add(engine, 3, 2)
    assert set(step(engine)) == {1}


def test_online_takes_the_seat_of_the_latest_batch_sequence() -> None:
    engine = scheduler(max_num_seqs=2)
    add(engine, 1, 6)
    add(engine, 2, 6)
    step(engine)
    add(engine, 3, 6, priority=Priority.ONLINE)
    add(engine, 4, 6)
    assert set(step(engine)) == {1, 3}
    assert engine.stats().preemptions == 1 and engine.stats().waiting == 2
    step(engine, finished=(3,))
    assert set(step(engine)) == {1, 2}


def test_tokens_granted_to_a_sequence_go_to_the_one_that_pushes_it_out() -> None:
    engine = scheduler(max_num_seqs=1, max_step_tokens=2, block_length=1)
    add(engine, 1, 1)
    step(engine)
    add(engine, 2, 5, priority=Priority.ONLINE)
    assert fed(step(engine)) == {2: (2, 0)}


def test_online_takes_blocks_from_batch() -> None:
    engine = tight()
    add(engine, 1, 8)
    add(engine, 2, 12)
    step(engine)
    add(engine, 3, 24, priority=Priority.ONLINE)
    assert set(step(engine)) == {1, 3}
    assert engine.stats().preemptions == 1


def test_batch_takes_nothing_from_online_and_peers_nothing_from_each_other() -> None:
    for priority in Priority:
        engine = scheduler(max_num_seqs=1)
        add(engine, 1, 6, priority=Priority.ONLINE)
        step(engine)
        add(engine, 2, 6, priority=priority)
        assert set(step(engine)) == {1}


def test_online_preempts_nobody_where_that_would_not_make_enough_room() -> None:
    engine = tight()
    add(engine, 1, 16, priority=Priority.ONLINE)
    add(engine, 2, 4)
    step(engine)
    add(engine, 3, 28, priority=Priority.ONLINE)
    assert set(step(engine)) == {1, 2}
    assert engine.stats().preemptions == 0


def test_integrity_names_a_sequence_that_would_write_where_others_read() -> None:
    engine = scheduler()
    add(engine, 1, 6)
    add(engine, 2, 6)
    step(engine)
    first, second = engine._residency.running
    second.blocks[1] = first.blocks[1]
    with pytest.raises(IntegrityError, match=r"block \d+ with 1 references is in 2 tables"):
        engine.check_integrity()
    engine._residency._blocks._ref_counts[first.blocks[1]] += 1
    engine._residency._blocks._ref_counts[3] = 0
    engine._residency._blocks._free.append(3)
    with pytest.raises(IntegrityError, match=r"sequence 1 .* would write to blocks \[1\]"):
        engine.check_integrity()
