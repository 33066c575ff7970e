"""The index tensors of a round against loops over rows and positions, at odd sizes, in poisoned memory."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.rounds import (
    ANCHOR,
    DRAFTED,
    Choices,
    DraftBlocks,
    Feed,
    PlanRows,
    SlotState,
    run_choices,
    run_draft_feed,
    run_feed,
    run_update_tables,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, TABLE, BLOCK_SIZE, NUM_DRAFTS, PADDING_CELL, MASK = 9, 70, 3, 7, 10_000, 304
POISON = 2**31 - 1
GUARD = 40
"""Entries behind each output that nobody may write."""


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@dataclass
class Guarded:
    """An output of poison, and the memory behind it."""

    whole: Tensor

    @classmethod
    def new(cls, size: int, dtype: torch.dtype = torch.int32) -> Guarded:
        return cls(torch.full((size + GUARD,), POISON, dtype=dtype, device=DEVICE))

    def view(self, *shape: int) -> Tensor:
        return self.whole[:-GUARD].view(*shape)

    @property
    def is_whole(self) -> bool:
        return bool((self.whole[-GUARD:] == POISON).all())


@dataclass
class Row:
    """What one row feeds: `known` tokens, or its anchor where it is ahead, and drafted ones."""

    slot: int
    start: int
    known: list[int] | None
    num_draft: int
    draft_row: int

    @property
    def num_tokens(self) -> int:
        return 1 if self.known is None else len(self.known)


class World:
    """Slots at random places, and rows of some of them that fill `size` tokens."""

    def __init__(self, seed: int, size: int) -> None:
        chance = random.Random(seed)
        self.length = [chance.randrange(80) for _ in range(SLOTS)]
        self.anchor = [chance.randrange(300) for _ in range(SLOTS)]
        blocks = chance.sample(range(3000), SLOTS * TABLE)
        self.tables = [blocks[slot * TABLE :][:TABLE] for slot in range(SLOTS)]
        self.drafts = [[chance.randrange(300) for _ in range(NUM_DRAFTS)] for _ in range(SLOTS)]
        self.rows: list[Row] = []
        places = chance.sample(range(SLOTS), SLOTS)
        for slot in chance.sample(range(SLOTS), SLOTS):
            left = size - sum(row.num_tokens + row.num_draft for row in self.rows)
            if not left:
                break
            ahead = chance.random() < 0.5
            num_draft = min(chance.choice([0, 3, NUM_DRAFTS]), left - 1)
            most = left - num_draft
            known = [chance.randrange(300) for _ in range(min(most, chance.choice([1, 1, 2, 60])))]
            start = -1 if ahead else chance.choice([0, chance.randrange(80)])
            self.rows.append(Row(slot, start, None if ahead else known, num_draft, places[len(self.rows)]))
        counts = [row.num_tokens + row.num_draft for row in self.rows]
        self.firsts = [sum(counts[:index]) for index in range(len(counts))]
        self.size = size

    def base(self, row: Row) -> int:
        return self.length[row.slot] if row.start < 0 else row.start

    def cell(self, slot: int, position: int) -> int:
        return self.tables[slot][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    @property
    def state(self) -> SlotState:
        tables = torch.tensor(self.tables, dtype=torch.int32, device=DEVICE)
        return SlotState(ints(self.length), ints(self.anchor, torch.int64), tables)

    @property
    def plan(self) -> PlanRows:
        """Places in it that belong to no row hold poison."""
        columns = [
            [row.slot for row in self.rows],
            [row.start for row in self.rows],
            [row.num_tokens for row in self.rows],
            [row.num_draft for row in self.rows],
            [1] * len(self.rows),
            self.firsts,
            [POISON] * len(self.rows),
            [row.draft_row for row in self.rows],
        ]
        return PlanRows(*(ints(column + [POISON] * 3) for column in columns))

    def codes(self) -> tuple[list[int], list[int]]:
        """Codes and rows of the fed tokens, with padding at the end; its codes are poison."""
        codes: list[int] = []
        row_of: list[int] = []
        for index, row in enumerate(self.rows):
            codes += [ANCHOR] if row.known is None else row.known
            codes += [DRAFTED - offset for offset in range(row.num_draft)]
            row_of += [index] * (len(codes) - len(row_of))
        padding = self.size - len(codes)
        return codes + [POISON] * padding, row_of + [-1] * padding

    def expected(self, windows: list[int]) -> list[tuple[int, ...]]:
        """By fed token: token, position, cell, slot, and first and last-plus-one key of each span."""
        fed = []
        for row in self.rows:
            known = [self.anchor[row.slot]] if row.known is None else row.known
            tokens = known + self.drafts[row.draft_row][: row.num_draft]
            for position, token in enumerate(tokens, self.base(row)):
                begins = [max(position + 1 - window, 0) if window else 0 for window in windows]
                ends = [position + 1] * len(windows)
                fed.append(
                    (token, position, self.cell(row.slot, position), row.slot, *begins, *ends),
                )
        padding = (0, 0, PADDING_CELL, 0, *[0] * (2 * len(windows)))
        return fed + [padding] * (self.size - len(fed))


def guarded_feed(size: int, spans: int) -> tuple[Feed, list[Guarded]]:
    kinds = [torch.int64, torch.int32, torch.int64, torch.int32]
    flat = [Guarded.new(size, dtype) for dtype in kinds]
    spread = [Guarded.new(spans * size) for _ in range(2)]
    views = [*(each.view(size) for each in flat), *(each.view(spans, size) for each in spread)]
    return Feed(*views), flat + spread


def by_token(feed: Feed) -> list[tuple[int, ...]]:
    columns = [*feed[:4], *feed.begin, *feed.end]
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("windows", [[0], [5], [0, 24, 1]])
@pytest.mark.parametrize("size", [1, 2, 31, 127, 128, 129, 300])
def test_what_is_fed_is_what_the_plan_and_the_slots_say(size: int, windows: list[int]):
    world = World(size, size)
    feed, guards = guarded_feed(size, len(windows))
    codes, token_row = world.codes()
    assert sum(row >= 0 for row in token_row) >= min(size, 20)
    # Between the columns of drafts that exist stands poison too: rows are a stride apart.
    drafts = torch.full((SLOTS, NUM_DRAFTS + 3), POISON, dtype=torch.int32, device=DEVICE)
    drafts[:, :NUM_DRAFTS] = torch.tensor(world.drafts, dtype=torch.int32, device=DEVICE)
    run_feed(
        ints(codes), ints(token_row), world.plan, world.state, drafts[:, :NUM_DRAFTS], feed, ints(windows),
        BLOCK_SIZE, PADDING_CELL,
    )  # fmt: skip
    assert by_token(feed) == world.expected(windows)
    assert all(guard.is_whole for guard in guards)


@pytest.mark.parametrize("size", [1, 127, 128, 129])
def test_choices_are_those_behind_the_last_known_token_and_each_drafted_one(size: int):
    world = World(size + 1, 200)
    wanted = []
    for index, (row, first) in enumerate(zip(world.rows, world.firsts, strict=True)):
        for offset in range(row.num_draft + 1):
            at = first + row.num_tokens - 1 + offset
            position = world.base(row) + row.num_tokens + offset
            wanted.append((index, offset, (row.slot, position, at, at, offset)))
    wanted = (wanted * 8)[: max(size - 3, 1)]
    rows = [row for row, _, _ in wanted] + [-1] * (size - len(wanted))
    offsets = [offset for _, offset, _ in wanted] + [POISON] * (size - len(wanted))
    kinds = [torch.int32, torch.int32, torch.int64, torch.int32, torch.int32]
    guards = [Guarded.new(size, dtype) for dtype in kinds]
    choices = Choices(*(guard.view(size) for guard in guards))
    run_choices(ints(rows), ints(offsets), world.plan, world.state, choices)
    found = list(zip(*(column.tolist() for column in choices), strict=True))
    assert found == [each for _, _, each in wanted] + [(-1, 0, 0, 0, 0)] * (size - len(wanted))
    assert all(guard.is_whole for guard in guards)


SPANS = [[(0, 1)], [(0, 0)], [(6, 0), (0, 1), (4, 1), (0, 0)]]
"""Windows (0: none), and whether a row sees only what stands before it."""


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(("num_rows", "block"), [(1, 1), (1, 8), (3, 5), (16, 8), (17, 8), (4, 64)])
def test_draft_blocks_are_an_anchor_and_masks_behind_where_the_sequence_is(
    num_rows: int, block: int, spans: list[tuple[int, int]]
):
    world, chance = World(block, 1), random.Random(num_rows)
    slots = [chance.choice([-1, *range(SLOTS)]) for _ in range(num_rows - 1)] + [2]
    starts = [chance.choice([-1, 0, chance.randrange(80)]) if slot >= 0 else POISON for slot in slots]
    anchors = [chance.randrange(300) if start >= 0 else POISON for start in starts]
    size = num_rows * block
    feed, guards = guarded_feed(size, len(spans))
    tiles = Guarded.new(2 * num_rows)
    run_draft_feed(
        DraftBlocks(ints(slots), ints(starts), ints(anchors)), world.state, feed, tiles.view(num_rows, 2),
        (ints([window for window, _ in spans]), ints([causal for _, causal in spans])), MASK, block,
        BLOCK_SIZE, PADDING_CELL,
    )  # fmt: skip
    expected, expected_tiles = [], []
    for index, (slot, start, anchor) in enumerate(zip(slots, starts, anchors, strict=True)):
        expected_tiles.append([index * block, block if slot >= 0 else 0])
        if slot < 0:
            expected += [(0, 0, PADDING_CELL, 0, *[0] * (2 * len(spans)))] * block
            continue
        base = start if start >= 0 else world.length[slot]
        for position in range(base, base + block):
            own = anchor if start >= 0 else world.anchor[slot]
            begins = [max(position + 1 - window, 0) if window else 0 for window, _ in spans]
            ends = [position + 1 if causal else base + block for _, causal in spans]
            token = own if position == base else MASK
            expected.append((token, position, world.cell(slot, position), slot, *begins, *ends))
    assert by_token(feed) == expected
    assert tiles.view(num_rows, 2).tolist() == expected_tiles
    assert all(guard.is_whole for guard in (*guards, tiles))


@pytest.mark.parametrize("num", [0, 1, 127, 128, 129])
def test_tables_change_in_the_places_named_and_nowhere_else(num: int):
    chance = random.Random(num)
    places = chance.sample([(slot, index) for slot in range(SLOTS) for index in range(TABLE)], num)
    tables = torch.full((SLOTS, TABLE), -7, dtype=torch.int32, device=DEVICE)
    expected = tables.clone()
    updates = [[slot, index, chance.randrange(1000)] for slot, index in places]
    for slot, index, block in updates:
        expected[slot, index] = block
    run_update_tables(ints([value for each in updates for value in each]).view(-1, 3), tables)
    assert torch.equal(tables, expected)


def test_lengths_that_do_not_fit_each_other_are_refused_by_name():
    world = World(0, 8)
    feed, _ = guarded_feed(8, 1)
    drafts = torch.zeros((SLOTS, NUM_DRAFTS), dtype=torch.int32, device=DEVICE)
    seven, eight = ints([0] * 7), ints([0] * 8)
    with pytest.raises(ValueError, match="codes"):
        run_feed(eight, seven, world.plan, world.state, drafts, feed, ints([0]), 3, 0)
    with pytest.raises(ValueError, match="rows_of"):
        run_choices(eight, seven, world.plan, world.state, Choices(*[eight] * 5))
    tiles = torch.zeros((2, 2), dtype=torch.int32, device=DEVICE)
    for blocks in (DraftBlocks(eight, seven, eight), DraftBlocks(*[ints([0, 1])] * 3)):
        with pytest.raises(ValueError, match=r"draft slots|do not fill"):
            run_draft_feed(blocks, world.state, feed, tiles, (ints([0]), ints([1])), MASK, 3, 3, 0)
    for updates in (eight, eight.view(2, 4), torch.zeros((2, 3))):
        with pytest.raises(ValueError, match="updates"):
            run_update_tables(updates, world.state.tables)
