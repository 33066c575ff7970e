"""What a step computes: chunks, drafts, and who gets the budget."""

from __future__ import annotations

import pytest

from dflash_engine.blocks import IntegrityError
from dflash_engine.errors import ConfigError
from dflash_engine.plan import RowCommit
from dflash_engine.request import Priority
from dflash_engine.step_budget import LEAST_CHUNK, PromptLimit
from dflash_engine.step_filling import CROWD
from tests.dflash_engine.schedules import NEXT, add, fed, plan, scheduler, step


def test_a_pool_too_small_for_the_longest_sequence_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"holds 64 tokens.* need 68 .*kv_cache_tokens.*max_model_len"):
        scheduler(num_blocks=16)
    scheduler(num_blocks=17)


def test_with_no_sequence_there_is_no_plan() -> None:
    engine = scheduler()
    assert engine.plan() is None
    add(engine, 1, 3)
    step(engine, finished=(1,))
    assert engine.plan() is None
    assert engine.stats().free_blocks == 200


def test_a_long_prompt_is_fed_in_chunks_and_only_the_last_one_samples() -> None:
    engine = scheduler(max_step_tokens=10)
    add(engine, 1, 23)
    rows = [step(engine)[1] for _ in range(3)]
    assert [(row.start, len(row.tokens), row.sample) for row in rows] == [
        (0, 10, False),
        (10, 10, False),
        (20, 3, True),
    ]
    assert sum((row.tokens for row in rows), ()) == tuple(range(100, 123))


def test_the_next_row_begins_with_the_last_committed_token() -> None:
    engine = scheduler()
    add(engine, 1, 6)
    step(engine)
    row = step(engine, accepted=2)[1]
    assert (row.start, row.tokens, row.num_draft, row.sample) == (6, (NEXT,), 3, True)
    row = plan(engine)[1]
    assert (row.start, row.tokens) == (9, (NEXT,))
    assert (row.prompt, list(row.output)) == (tuple(range(100, 106)), [NEXT] * 4)


def test_nothing_is_drafted_that_max_tokens_would_cut_off() -> None:
    engine = scheduler()
    add(engine, 1, 6, max_tokens=4)
    step(engine)
    assert step(engine)[1].num_draft == 2
    assert step(engine)[1].num_draft == 1
    assert step(engine, finished=(1,))[1].num_draft == 0


def test_nothing_is_drafted_where_the_block_would_pass_the_models_length() -> None:
    engine = scheduler(max_model_len=16, block_length=4)
    add(engine, 1, 11, max_tokens=99)
    rows = [step(engine)[1] for _ in range(4)]
    assert [(row.start, row.num_draft) for row in rows] == [(0, 0), (11, 3), (12, 2), (13, 0)]


def test_block_length_one_decodes_plainly() -> None:
    engine = scheduler(block_length=1)
    add(engine, 1, 6)
    assert [fed(step(engine))[1] for _ in range(3)] == [(6, 0), (1, 0), (1, 0)]


@pytest.mark.parametrize("max_tokens", [20, 3])
def test_a_drafting_row_has_room_for_the_whole_draft_block(max_tokens: int) -> None:
    engine = scheduler(block_size=1)
    add(engine, 1, 6, max_tokens)
    assert len(step(engine)[1].block_table) == 6
    row = plan(engine)[1]
    assert row.num_draft == min(3, max_tokens - 2)
    assert len(row.block_table) >= row.start + 4


def test_decoding_goes_first_and_a_prompt_gets_what_is_left() -> None:
    engine = scheduler(max_step_tokens=12)
    add(engine, 1, 5)
    step(engine)
    add(engine, 2, 20)
    assert fed(step(engine)) == {1: (1, 3), 2: (8, 0)}
    assert fed(step(engine)) == {1: (1, 3), 2: (8, 0)}
    assert fed(step(engine)) == {1: (1, 3), 2: (4, 0)}
    assert fed(step(engine)) == {1: (1, 3), 2: (1, 3)}


def test_while_others_decode_a_prompt_gets_no_more_than_its_share_of_a_step() -> None:
    engine = scheduler(prompt_limit=PromptLimit(9))
    add(engine, 1, 20)
    assert fed(step(engine)) == {1: (20, 0)}
    add(engine, 2, 20)
    assert [fed(step(engine))[2] for _ in range(3)] == [(8, 0), (8, 0), (4, 0)]


def test_tokens_far_behind_in_a_prompt_count_for_more_and_a_few_are_always_fed() -> None:
    engine = scheduler(
        prompt_limit=PromptLimit(65, span=64), max_step_tokens=200, max_model_len=1000, num_blocks=500
    )
    add(engine, 1, 20)
    step(engine)
    add(engine, 2, 400)
    # 64, then 64 / (1 + 64 / 64), and so on.
    assert [fed(step(engine))[2][0] for _ in range(4)] == [64, 32, 25, 22]
    chunks = [fed(step(engine))[2][0] for _ in range(10)]
    assert min(chunks) == LEAST_CHUNK and sum(chunks) + 143 <= 400


def test_many_who_decode_leave_prompts_a_quarter_of_the_limit() -> None:
    engine = scheduler(prompt_limit=PromptLimit(8), max_num_seqs=20, num_blocks=400)
    for seq_id in range(1, 13):
        add(engine, seq_id, 2)
    step(engine)
    add(engine, 20, 9)
    assert fed(step(engine))[20] == (2, 0)


def test_a_crowd_of_prompts_is_not_held_back_for_those_who_decode() -> None:
    engine = scheduler(prompt_limit=PromptLimit(8), max_num_seqs=16, num_blocks=400)
    add(engine, 1, 5)
    step(engine)
    for seq_id in range(2, 2 + CROWD):
        add(engine, seq_id, 6)
    rows = fed(step(engine))
    assert sum(num_tokens for seq_id, (num_tokens, _) in rows.items() if seq_id > 1) == CROWD * 6


def test_nothing_is_drafted_for_the_first_token_even_where_one_prompt_token_is_left() -> None:
    engine = scheduler()
    add(engine, 1, 1)
    assert fed(step(engine)) == {1: (1, 0)}
    assert fed(step(engine)) == {1: (1, 3)}


def test_a_small_budget_takes_from_the_drafts_evenly_and_in_turn() -> None:
    engine = scheduler(max_step_tokens=11)
    for seq_id in (1, 2, 3):
        add(engine, seq_id, 3)
    step(engine)
    drafts = [{i: row.num_draft for i, row in step(engine).items()} for _ in range(3)]
    assert [sorted(each.values()) for each in drafts] == [[2, 3, 3]] * 3
    assert {i: sum(each[i] for each in drafts) for i in (1, 2, 3)} == {1: 8, 2: 8, 3: 8}


def test_a_budget_smaller_than_the_number_of_sequences_goes_around() -> None:
    engine = scheduler(max_step_tokens=3, block_length=1)
    for seq_id in (1, 2, 3):
        add(engine, seq_id, 1)
    step(engine)
    add(engine, 4, 1, priority=Priority.ONLINE)
    assert sorted(step(engine)) == [1, 2, 4]
    rows = [step(engine) for _ in range(6)]
    assert all(len(each) == 3 and 4 in each for each in rows)
    assert [sum(seq_id in each for each in rows) for seq_id in (1, 2, 3)] == [4, 4, 4]


def test_an_online_prompt_has_the_whole_budget_before_batch_has_its_anchors() -> None:
    engine = scheduler(max_step_tokens=8)
    add(engine, 1, 4)
    add(engine, 2, 4)
    step(engine)
    add(engine, 3, 13, priority=Priority.ONLINE)
    assert fed(step(engine)) == {3: (8, 0)}
    assert fed(step(engine)) == {3: (5, 0), 1: (1, 1), 2: (1, 0)}


def test_a_prompt_goes_on_even_where_anchors_of_its_class_would_take_the_whole_budget() -> None:
    engine = scheduler(max_step_tokens=2, block_length=1)
    add(engine, 9, 1)
    step(engine)
    for seq_id in (1, 2):
        add(engine, seq_id, 1, priority=Priority.ONLINE)
    assert set(step(engine)) == {1, 2}
    add(engine, 3, 3, priority=Priority.ONLINE)
    steps = [step(engine) for _ in range(3)]
    assert [rows.pop(3).start for rows in steps] == [0, 1, 2]
    assert [set(rows) for rows in steps] == [{1}, {2}, {1}]


def test_drafts_leave_half_of_the_budget_to_prompts() -> None:
    engine = scheduler(max_step_tokens=8, block_length=8)
    add(engine, 1, 6)
    add(engine, 2, 9)
    assert fed(step(engine)) == {1: (6, 0), 2: (2, 0)}
    assert fed(step(engine)) == {1: (1, 3), 2: (4, 0)}
    assert fed(step(engine)) == {1: (1, 3), 2: (3, 0)}
    engine.abort(2)
    add(engine, 3, 2)
    assert fed(step(engine)) == {1: (1, 5), 3: (2, 0)}


def test_drafts_leave_nothing_to_a_prompt_that_has_no_seat_or_is_of_a_lower_class() -> None:
    for settings, priority in (({"max_num_seqs": 1}, Priority.BATCH), ({}, Priority.BATCH)):
        engine = scheduler(max_step_tokens=8, block_length=8, **settings)
        add(engine, 1, 6, priority=Priority.BATCH if settings else Priority.ONLINE)
        step(engine)
        add(engine, 2, 9, priority=priority)
        assert fed(step(engine))[1] == (1, 7)


def test_with_a_budget_of_one_token_the_first_in_rank_goes_on_alone() -> None:
    engine = scheduler(max_step_tokens=1)
    add(engine, 1, 2)
    add(engine, 2, 2)
    rows = [step(engine) for _ in range(3)]
    add(engine, 3, 2, priority=Priority.ONLINE)
    rows += [step(engine) for _ in range(3)]
    assert [list(each) for each in rows] == [[1]] * 3 + [[3]] * 3


def test_an_idle_scheduler_says_who_is_left() -> None:
    engine = scheduler()
    engine.check_idle()
    add(engine, 7, 6)
    with pytest.raises(IntegrityError, match=r"sequences \[7\] are known"):
        engine.check_idle()
    engine.abort(7)
    engine.check_idle()


def test_abort_releases_waiting_and_running_sequences() -> None:
    engine = scheduler(max_num_seqs=1)
    add(engine, 1, 6)
    add(engine, 2, 6)
    step(engine)
    engine.abort(1)
    engine.check_integrity()
    assert engine.stats().free_blocks == 200
    assert set(step(engine)) == {2}
    add(engine, 3, 6)
    engine.abort(3)
    engine.abort(2)
    engine.check_integrity()
    assert engine.plan() is None


def test_a_planned_row_can_be_ended_without_a_token() -> None:
    engine = scheduler()
    add(engine, 1, 6)
    plan(engine)
    engine.commit([RowCommit(1, (), finished=True)])
    engine.check_integrity()
    assert engine.plan() is None


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [RowCommit(2, (NEXT,), False)],
        [RowCommit(1, (NEXT,), False)] * 2,
        [RowCommit(1, (), False)],
        [RowCommit(1, (NEXT, NEXT), False)],
    ],
    ids=["missing", "unknown", "twice", "no token", "more tokens than drafted"],
)
def test_commit_takes_only_what_was_planned(rows: list[RowCommit]) -> None:
    engine = scheduler()
    add(engine, 1, 6)
    plan(engine)
    with pytest.raises(AssertionError):
        engine.commit(rows)
