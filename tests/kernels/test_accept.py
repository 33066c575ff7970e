"""Acceptance against cases by hand, the plain definition, and decoding token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.accept import AcceptRows, accept, accept_reference
from kernels.sampling import MAX_DRAFT, SamplingTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, SLOTS = 40, 6
NAMES = [field.name for field in fields(AcceptRows)]


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@dataclass
class Row:
    """What one row feeds and what is chosen behind its last known token and each drafted one."""

    slot: int
    start: int
    known: list[int]
    draft: list[int]
    choices: list[int] | None
    """None: a part of a prompt, without a sample."""


@dataclass
class State:
    length: Tensor
    anchor: Tensor
    table: SamplingTable

    @classmethod
    def new(cls) -> State:
        table = SamplingTable.empty(SLOTS, VOCAB, DEVICE)
        table.frequency[1], table.presence[3], table.repetition[4] = 0.5, -1.0, 1.1
        return cls(ints(list(range(100, 100 + SLOTS))), ints([7] * SLOTS, torch.int64), table)

    def copy(self) -> State:
        table = replace(self.table, counts=self.table.counts.clone())
        return State(self.length.clone(), self.anchor.clone(), table)


def run(rows: list[Row], state: State, columns: int, implementation: Any = accept) -> tuple[Tensor, Tensor]:
    """(out, num_out); whatever stood in them before must not show."""
    fed, chosen = [39, 39], [38]
    plan: list[list[int]] = []
    for row in rows:
        sample = row.choices is not None
        plan.append([row.slot, row.start, len(row.known), len(row.draft), sample, len(fed), len(chosen)])
        fed += row.known + row.draft
        chosen += row.choices or []
    planned = AcceptRows(*(ints(list(column)) for column in zip(*plan, strict=True)))
    out = torch.full((len(rows), columns), -5, dtype=torch.int32, device=DEVICE)
    num_out = torch.full((len(rows),), -5, dtype=torch.int32, device=DEVICE)
    implementation(
        planned, ints(chosen), ints(fed, torch.int64), state.length, state.anchor, state.table, out, num_out
    )
    return out, num_out


@pytest.mark.parametrize("implementation", [accept, accept_reference])
def test_each_kind_of_row_does_what_the_plan_says(implementation: Any):
    state = State.new()
    rows = [
        Row(0, -1, [11], [1, 2, 3], [1, 2, 9, 8]),  # two of three stand
        Row(1, -1, [12], [5, 5, 5], [5, 5, 5, 5]),  # all stand
        Row(-1, 3, [13], [1], [1, 1]),  # padding
        Row(2, 40, [14, 15, 16], [], None),  # a part of a prompt
        Row(3, 50, [17, 18], [4, 6], [3, 6, 4]),  # the end of a prompt, the draft is wrong at once
        Row(4, -1, [19], [], [20]),  # plain decoding
    ]
    out, num_out = run(rows, state, 5, implementation)
    assert out.tolist() == [
        [1, 2, 9, 0, 0],
        [5, 5, 5, 5, 0],
        [0] * 5,
        [0] * 5,
        [3, 0, 0, 0, 0],
        [20, 0, 0, 0, 0],
    ]
    assert num_out.tolist() == [3, 4, 0, 0, 1, 1]
    assert state.length.tolist() == [100 + 3, 101 + 4, 43, 52, 105, 105]
    assert state.anchor.tolist() == [9, 5, 7, 3, 20, 7]
    counted = {
        (slot, token): int(state.table.counts[slot, token]) for slot, token in state.table.counts.nonzero()
    }
    assert {(int(slot), int(token)): n for (slot, token), n in counted.items()} == {
        (1, 5): 4,
        (3, 3): 1,
        (4, 20): 1,
    }


@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_is_its_definition_on_random_plans(seed: int):
    chance = random.Random(seed)
    most = chance.choice([1, 7, 15, MAX_DRAFT - 1])
    first, second = State.new(), None
    for _ in range(4):
        slots = chance.sample(range(SLOTS), chance.randint(1, SLOTS)) + [-1] * chance.randint(0, 2)
        chance.shuffle(slots)
        rows = []
        for slot in slots:
            choices = [chance.randrange(3) for _ in range(chance.randint(0, most) + 1)]
            draft = [token if chance.random() < 0.9 else 3 for token in choices[:-1]]
            known = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 4))]
            if chance.random() < 0.2:
                draft, choices = [], None
            rows.append(Row(slot, chance.choice([-1, 0, 70]), known, draft, choices))
        second = first.copy()
        found = run(rows, first, most + 1)
        expected = run(rows, second, most + 1, accept_reference)
        assert [t.tolist() for t in found] == [t.tolist() for t in expected]
        for mine, theirs in zip(vars(first).values(), vars(second).values(), strict=True):
            if isinstance(mine, Tensor):
                assert torch.equal(mine, theirs)
        assert torch.equal(first.table.counts, second.table.counts)


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_drafted_rounds_give_the_tokens_and_the_state_of_plain_decoding(right: float):
    """The target here chooses a fixed text; its draft is right as often as `right` says."""
    chance = random.Random(3)
    text = [chance.randrange(VOCAB) for _ in range(120)]
    state = State.new()
    slot, block = 1, 8
    answer: list[int] = []
    out, num_out = run([Row(slot, 0, text[:5], [], [text[5]])], state, block)
    answer += out[0, : int(num_out)].tolist()
    while len(answer) < 100:
        at = int(state.length[slot])
        assert at == 5 + len(answer) - 1 and int(state.anchor[slot]) == text[at]
        wanted = text[at + 1 : at + 1 + block]
        draft = [token if chance.random() < right else (token + 1) % VOCAB for token in wanted[:-1]]
        # Behind a wrong token the target's choices are of another text.
        good = next((i for i, token in enumerate(draft) if token != wanted[i]), len(draft))
        choices = wanted[: good + 1] + [(token + 2) % VOCAB for token in draft[good:]]
        out, num_out = run([Row(slot, -1, [text[at]], draft, choices)], state, block)
        assert int(num_out) == good + 1
        answer += out[0, : int(num_out)].tolist()
    assert answer == text[5 : 5 + len(answer)]
    expected = torch.bincount(torch.tensor(answer), minlength=VOCAB)
    assert torch.equal(state.table.counts[slot].cpu(), expected.to(torch.int16))
    assert int(state.table.counts.sum()) == len(answer)


@pytest.mark.parametrize(
    "name", [*(f"rows.{name}" for name in NAMES), "chosen", "fed", "length", "anchor", "num_out"]
)
def test_what_the_kernel_would_misread_is_refused_by_name(name: str):
    state = State.new()
    row = ints([0, 1])
    plan = dict.fromkeys(NAMES, row)
    arguments: dict[str, Any] = {
        "chosen": row,
        "fed": ints([1, 2, 3], torch.int64),
        "length": state.length,
        "anchor": state.anchor,
        "num_out": row.clone(),
    }
    if name.startswith("rows."):
        plan[name.removeprefix("rows.")] = row.float()
    else:
        arguments[name] = arguments[name].float()
    with pytest.raises(ValueError, match=name):
        accept(AcceptRows(**plan), **arguments, table=state.table, out=torch.zeros(2, 4, dtype=torch.int32))


def test_more_columns_than_a_draft_can_fill_are_refused():
    state, row = State.new(), ints([0])
    rows, fed = AcceptRows(*[row] * len(NAMES)), row.long()
    out = torch.zeros(1, MAX_DRAFT + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="out"):
        accept(rows, row, fed, state.length, state.anchor, state.table, out, row)
