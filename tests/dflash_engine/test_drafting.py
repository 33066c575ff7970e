"""What a draft policy decides, and the draft context that is left out and rebuilt for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from dflash_engine.plan import RowPlan, StepPlan
from dflash_engine.scheduler import Scheduler
from tests.dflash_engine.schedules import NEXT, add, commit, scheduler


class Choice(NamedTuple):
    num_draft: tuple[int, ...]
    write_context: bool


class Obedient:
    """Does what the test says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.most = 99
        self.write_context = True
        self.rebuild = False
        self.asked: list[tuple[list[tuple[int, int, int]], int]] = []
        self.remaining: list[tuple[int, int]] = []

    def choose(self, candidates: Sequence[Any], other_tokens: int) -> Choice:
        self.asked.append(([(c.request_id, c.most, c.missing_context) for c in candidates], other_tokens))
        return Choice(tuple(min(c.most, self.most) for c in candidates), self.write_context)

    def worth_rebuilding(self, candidate: Any, remaining_tokens: int) -> bool:
        self.remaining.append((candidate.missing_context, remaining_tokens))
        return self.rebuild


@pytest.fixture
def policy() -> Obedient:
    return Obedient()


def go(engine: Scheduler, accepted: int = 0) -> tuple[StepPlan, dict[int, RowPlan]]:
    each = engine.plan()
    assert each is not None
    rows = {row.seq_id: row for row in each.rows}
    commit(engine, rows, accepted)
    return each, rows


def test_the_policy_is_asked_about_decoding_rows_and_told_what_else_is_fed(policy: Obedient) -> None:
    engine = scheduler(draft_policy=policy, max_step_tokens=12)
    add(engine, 1, 6)
    add(engine, 2, 15, max_tokens=3)
    go(engine)
    go(engine)
    assert policy.asked == [([(1, 3, 0)], 9)]
    policy.most = 2
    _, rows = go(engine)
    assert policy.asked[-1] == ([(1, 3, 0), (2, 0, 0)], 0)
    assert rows[1].num_draft == 2


def test_a_row_drafts_no_more_than_the_policy_says_and_the_budget_has(policy: Obedient) -> None:
    engine = scheduler(draft_policy=policy, max_step_tokens=6)
    add(engine, 1, 2)
    add(engine, 2, 2)
    go(engine)
    _, rows = go(engine)
    assert sorted(row.num_draft for row in rows.values()) == [2, 2]
    policy.most = 1
    _, rows = go(engine)
    assert [row.num_draft for row in rows.values()] == [1, 1]


def without_context(policy: Obedient, **changes: Any) -> Scheduler:
    """Sequence 1 with context for positions 0..5 (the prompt) and none for the two behind it."""
    engine = scheduler(draft_policy=policy, **changes)
    add(engine, 1, 6)
    go(engine)
    policy.write_context = False
    for _ in range(2):
        each, rows = go(engine)
        assert not each.write_context and len(rows) == 1
    policy.write_context = True
    return engine


def test_without_its_context_a_sequence_does_not_draft(policy: Obedient) -> None:
    engine = without_context(policy)
    _, rows = go(engine)
    assert policy.asked[-1] == ([(1, 0, 2)], 0)
    assert rows[1].num_draft == 0
    go(engine)
    assert policy.remaining[-1] == (3, 20 - 4)


def test_missing_context_is_rebuilt_by_feeding_known_tokens_again(policy: Obedient) -> None:
    engine = without_context(policy)
    go(engine)
    policy.rebuild = True
    each, rows = go(engine)
    row = rows[1]
    assert each.write_context and row.rebuild and not row.sample and not row.ahead
    assert (row.start, row.tokens, row.num_draft) == (6, (NEXT,) * 3, 0)
    _, rows = go(engine)
    row = rows[1]
    assert (row.start, row.tokens, row.num_draft, row.rebuild) == (9, (NEXT,), 3, False)


def test_rebuilding_goes_in_chunks_while_others_decode(policy: Obedient) -> None:
    engine = without_context(policy, max_step_tokens=6)
    policy.rebuild = True
    add(engine, 2, 1)
    starts = []
    for _ in range(3):
        _, rows = go(engine)
        starts += [(row.start, row.num_tokens) for row in rows.values() if row.rebuild]
        assert 2 in rows
    assert starts == [(6, 2), (8, 1)]


def test_a_round_in_flight_is_waited_for_before_rebuilding(policy: Obedient) -> None:
    engine = scheduler(draft_policy=policy, rounds_ahead=1)
    add(engine, 1, 6)
    policy.write_context = False
    plans = [engine.plan(), engine.plan()]
    policy.write_context = policy.rebuild = True
    commit(engine, {row.seq_id: row for row in plans[0].rows})
    third = engine.plan()
    commit(engine, {row.seq_id: row for row in plans[1].rows})
    assert third is not None and [row.num_draft for row in third.rows] == [0]
    assert engine.plan() is None
    commit(engine, {row.seq_id: row for row in third.rows})
    fourth = engine.plan()
    assert [(row.start, row.num_tokens, row.rebuild) for row in fourth.rows] == [(6, 2, True)]
    fifth = engine.plan()
    row = fifth.rows[0]
    assert (row.start, row.tokens, row.ahead, row.num_draft) == (8, (NEXT,), False, 3)


def test_a_prefix_without_context_is_used_but_not_drafted_on(policy: Obedient) -> None:
    engine = scheduler(draft_policy=policy)
    add(engine, 1, tuple(range(8)))
    go(engine)
    policy.write_context = False
    for _ in range(5):
        go(engine)
    assert engine._sequences[1].num_registered == 3
    policy.write_context = True
    add(engine, 2, (*range(8), *[NEXT] * 4, 50, 51))
    add(engine, 3, (*range(8), 60, 61))
    _, rows = go(engine)
    assert (rows[2].start, rows[3].start) == (12, 8)
    _, rows = go(engine)
    assert (rows[2].num_draft, rows[3].num_draft) == (0, 3)
    assert ([each for each in policy.asked[-1][0] if each[0] == 2]) == [(2, 0, 6)]
    policy.rebuild = True
    go(engine)
    policy.rebuild = False
    add(engine, 4, (*range(8), *[NEXT] * 4, 70, 71))
    _, rows = go(engine)
    assert rows[4].start == 12
    _, rows = go(engine)
    assert rows[4].num_draft == 3, "the shared block has its context again"
