"""What stands on the device when a round runs says what its plan says, also where it was not sent again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dflash_engine.gpu_runner import GpuRunner
from dflash_engine.graphs import Graphs
from dflash_engine.plan import RowPlan, StepPlan
from dflash_engine.request import SamplingParams
from dflash_engine.round_layout import FULL, WARM, Packed, RoundLayout, Shape, longest_of
from dflash_engine.slots import SlotTable, kind_of
from tests.dflash_engine.test_round_layout import Said, meant, read

ROWS, TOKENS, BLOCK = 5, 64, 8
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=5),
]


@dataclass
class Seen:
    """What the pieces of a round were asked to do, and what stood in the plan then."""

    said: list[Said] = field(default_factory=list)
    shape: Shape | None = None
    drafted: tuple[int, bool] | None = None
    context: int | None = None


class ReadingRound:
    """Takes the place of a `DeviceRound`: reads its plan, and gives out what was fed and how often."""

    block_length = BLOCK
    has_draft = True

    def __init__(self, layout: RoundLayout) -> None:
        self.plan = torch.full((sum(layout.sizes),), -1, dtype=torch.int32)
        self.results = torch.zeros(layout.rows * (BLOCK + 1), dtype=torch.int32)
        self.seen = Seen()
        self._layout = layout

    def draft(self, num_rows: int, noise: bool) -> None:
        self.seen.drafted = (num_rows, noise)

    def verify(self, shape: Shape) -> None:
        packed = Packed(shape, *(self.seen.drafted or (0, False)))
        self.seen.said = read(packed, self._layout.sections(self.plan.numpy()), self._layout)
        self.seen.shape = shape
        for row, said in enumerate(self.seen.said):
            self.results[row * BLOCK : (row + 1) * BLOCK] = torch.arange(BLOCK) + 10 * said.slot
            self.results[self._layout.rows * BLOCK + row] = 1 + row % BLOCK

    def context(self, num: int) -> None:
        self.seen.context = num


class World:
    """Sequences in slots that come, decode in steady rounds, and go."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rows: dict[int, RowPlan] = {}
        self.blocks: dict[int, list[int]] = {}

    def come(self, slot: int) -> None:
        sampling = self.chance.choice(SAMPLINGS)
        self.blocks[slot] = [3]
        self.rows[slot] = RowPlan(slot, 5, (1, 2), 0, True, self.blocks[slot], sampling, 9, (1, 2), (), slot)

    def plan(self) -> StepPlan:
        chance = self.chance
        if not self.rows or chance.random() < 0.15:
            self.come(chance.randrange(ROWS))
        event = chance.random()
        rows = list(self.rows.values())
        if event < 0.1:
            chance.shuffle(rows)
        elif event < 0.15:
            rows = rows[: max(len(rows) - 1, 1)]
        elif event < 0.2 and len(self.rows) > 1:
            del self.rows[rows.pop().slot]
        plan = StepPlan(tuple(rows), chance.random() < 0.95)
        for row in rows:
            num_draft = row.num_draft if row.ahead and chance.random() < 0.95 else chance.choice([0, 3, 7])
            grown = row.start + chance.randint(1, 40)
            if chance.random() < 0.1:
                self.blocks[row.slot].append(4)
            fields: dict[str, Any] = {"start": grown, "num_draft": num_draft, "ahead": True, "tokens": ()}
            if chance.random() < 0.03:  # resumed, or behind a round that was waited for
                fields |= {"ahead": False, "tokens": (7,)}
            self.rows[row.slot] = row._replace(**fields)
        self.rows = {row.slot: self.rows[row.slot] for row in rows} | self.rows
        return plan


def kinds_of(rows: Sequence[RowPlan]) -> set[int]:
    return {kind_of(row.sampling) for row in rows if row.sample}


def test_every_round_does_what_its_plan_says_whatever_was_sent_before():
    num_sent = num_rounds = 0
    for seed in range(12):
        layout = RoundLayout(ROWS, TOKENS)
        device, world = torch.device("cpu"), World(seed)
        made = ReadingRound(layout)
        slots = SlotTable(ROWS, 40, 16, device)
        never = lambda plan: None  # noqa: E731
        runner = GpuRunner(made, slots, layout, Graphs(device), never, (4, 2), device)
        for _ in range(150):
            plan = world.plan()
            made.seen = Seen()
            before = made.plan.clone()
            ticket = runner.launch(plan)
            seen, rows, shape = made.seen, plan.rows, ticket.packed.shape
            assert seen.said == meant(rows) and seen.shape == shape
            assert (shape.noise, shape.full > 0) == (WARM in kinds_of(rows), FULL in kinds_of(rows))
            assert (seen.context is not None) == plan.write_context == shape.taps
            drafting = [row for row in rows if row.num_draft]
            assert (seen.drafted is not None) == bool(drafting)
            if drafting:
                assert seen.drafted[0] >= len(drafting)
                assert seen.drafted[1] == any(kinds_of([row]) != {0} for row in drafting)
            assert shape.num_splits == 0 or shape.num_splits * 128 >= longest_of(plan) - 64
            output = runner.collect(ticket)
            assert [row.tokens for row in output.rows] == [
                tuple(np.arange(1 + at % BLOCK) + 10 * row.slot) for at, row in enumerate(rows)
            ]
            num_rounds += 1
            num_sent += not torch.equal(before, made.plan)
    assert 0.1 * num_rounds < num_sent < 0.9 * num_rounds
