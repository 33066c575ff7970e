"""A packed plan, read as the device reads it, says what the plan says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from dflash_engine.ops import ANCHOR, ATTENTION_SPLIT, DRAFTED
from dflash_engine.plan import RowPlan, StepPlan
from dflash_engine.request import SamplingParams
from dflash_engine.round_layout import (
    CHOICE_CHUNK,
    FULL,
    PLAIN,
    SIZES,
    WARM,
    Packed,
    RoundLayout,
    Sections,
    bucket,
    longest_of,
    pack,
    part_of,
)

STALE = -(10**6)
"""What the array holds from rounds before: no place of it may be read."""
PARAMS = SamplingParams()


class Said(NamedTuple):
    """One row as the device would run it."""

    slot: int
    start: int
    """-1: where the slot is"""
    fed: tuple[Any, ...]
    """Tokens, "anchor", or ("drafted", row of the drafts, place)."""
    choices: tuple[int, ...]
    """For each choice, how many drafted tokens stand before it."""
    drafted: tuple[Any, ...] | None
    """Slot, start and anchor of its draft block."""


def row_plan(slot: int, start: int, num_known: int, num_draft: int, **fields: Any) -> RowPlan:
    values = {"ahead": False, "sample": True, "rebuild": False} | fields
    tokens = () if values["ahead"] else tuple(range(start, start + num_known))
    return RowPlan(
        slot + 100, start, tokens, num_draft, values["sample"], [0], PARAMS, 0, (), (), slot, values["ahead"],
        values["rebuild"],
    )  # fmt: skip


def random_rows(chance: random.Random, most_rows: int, most_tokens: int, drafts: int) -> list[RowPlan]:
    rows: list[RowPlan] = []
    left = most_tokens
    for slot in chance.sample(range(most_rows), chance.randint(1, most_rows)):
        if not left:
            break
        kind = chance.choice(["ahead", "ahead", "decode", "chunk", "last chunk", "rebuild"])
        if kind in ("ahead", "decode"):
            num_draft = chance.randint(0, min(drafts, left - 1))
            rows.append(row_plan(slot, chance.randrange(300), 1, num_draft, ahead=kind == "ahead"))
        else:
            num = chance.randint(1, min(left, chance.choice([2, 40])))
            sample = kind == "last chunk"
            rows.append(row_plan(slot, chance.randrange(300), num, 0, sample=sample, rebuild=not sample))
        left -= rows[-1].num_tokens + rows[-1].num_draft
    return rows


def meant(rows: Sequence[RowPlan]) -> list[Said]:
    said: list[Said] = []
    for row in rows:
        known: tuple[Any, ...] = ("anchor",) if row.ahead else row.tokens
        place = sum(each.drafted is not None for each in said)
        start = -1 if row.ahead else row.start
        anchor = None if row.ahead else row.tokens[-1]
        said.append(
            Said(
                row.slot,
                start,
                (*known, *(("drafted", place, index) for index in range(row.num_draft))),
                tuple(range(row.num_draft + 1)) if row.sample else (),
                (row.slot, start, anchor) if row.num_draft else None,
            )
        )
    return said


def read(packed: Packed, sections: Sections[np.ndarray], layout: RoundLayout) -> list[Said]:
    """The rows as the device's kernels make them of the array, whole and in order; asserts its padding."""
    shape = packed.shape
    lists = Sections(*(section.tolist() for section in sections))
    num_rows = min(shape.tokens, layout.rows)
    num = next((row for row in range(num_rows) if lists.slot[row] < 0), num_rows)
    assert all(slot == -1 for slot in lists.slot[num:num_rows])
    drafting = min(packed.drafting, layout.rows)
    blocks = [
        (lists.draft_slot[row], lists.draft_start[row], lists.draft_anchor[row])
        for row in range(drafting)
        if lists.draft_slot[row] >= 0
    ]
    assert all(slot == -1 for slot in lists.draft_slot[len(blocks) : drafting])
    said: list[Said] = []
    at = num_chosen = 0
    for row in range(num):
        assert lists.first[row] == at, "rows stand side by side"
        fed: list[Any] = []
        drafted = None
        for code in lists.codes[at : at + lists.num_tokens[row] + lists.num_draft[row]]:
            assert lists.token_row[at] == row
            if code <= DRAFTED:
                fed.append(("drafted", lists.draft_row[row], DRAFTED - code))
            else:
                fed.append("anchor" if code == ANCHOR else code)
            at += 1
        if lists.num_draft[row]:
            slot, start, anchor = blocks[lists.draft_row[row]]
            drafted = (slot, start, anchor if start >= 0 else None)
        choices = ()
        if lists.sample[row]:
            assert lists.first_choice[row] == num_chosen
            span = slice(num_chosen, num_chosen + lists.num_draft[row] + 1)
            assert lists.choice_row[span] == [row] * (lists.num_draft[row] + 1)
            choices = tuple(lists.choice_offset[span])
            num_chosen = span.stop
        said.append(Said(lists.slot[row], lists.start[row], tuple(fed), choices, drafted))
    assert lists.token_row[at : shape.tokens] == [-1] * (shape.tokens - at)
    assert lists.choice_row[num_chosen : shape.choices] == [-1] * (shape.choices - num_chosen)
    return said


def check_tiles(packed: Packed, sections: Sections[np.ndarray], rows: Sequence[RowPlan]) -> None:
    """Each fed token is in one tile, each tile in one row."""
    tiles = sections.tiles[: 2 * packed.shape.tiles].reshape(-1, 2).tolist()
    seen = [token for first, size in tiles for token in range(first, first + size)]
    assert sorted(seen) == list(range(sum(row.num_tokens + row.num_draft for row in rows)))
    for first, size in tiles:
        assert 0 <= size <= packed.shape.tile_tokens
        assert size == 0 or len(set(sections.token_row[first : first + size].tolist())) == 1


def packed_by(
    rows: Sequence[RowPlan], layout: RoundLayout, kinds: np.ndarray, writes: bool = True
) -> tuple[Packed, Sections[np.ndarray]]:
    array = np.full(sum(layout.sizes), STALE, dtype=np.int32)
    sections = layout.sections(array)
    return pack(StepPlan(tuple(rows), writes), layout, sections, kinds, 2, 2, 4), sections


@pytest.mark.parametrize("seed", range(150))
def test_a_packed_plan_says_what_the_plan_says(seed: int):
    chance = random.Random(seed)
    layout = RoundLayout(chance.choice([1, 2, 3, 5, 8, 30]), chance.choice([8, 16, 96, 448]))
    rows = random_rows(chance, layout.rows, layout.tokens, chance.choice([0, 3, 7]))
    kinds = np.array([chance.choice([PLAIN, PLAIN, WARM, FULL]) for _ in range(layout.rows)], dtype=np.int8)
    writes = chance.random() < 0.5
    packed, sections = packed_by(rows, layout, kinds, writes)
    shape = packed.shape
    assert read(packed, sections, layout) == meant(rows)
    check_tiles(packed, sections, rows)
    chosen = [int(kinds[row.slot]) for row in rows if row.sample for _ in range(row.num_draft + 1)]
    full = [index for index, kind in enumerate(chosen) if kind == FULL]
    assert sections.full[: shape.full].tolist() == full + [-1] * (shape.full - len(full))
    assert (shape.noise, shape.taps) == (WARM in chosen, writes)
    assert packed.draft_noise == any(row.num_draft and kinds[row.slot] != PLAIN for row in rows)
    assert shape.tokens in SIZES
    assert shape.choices in (shape.tokens, shape.tokens // 4)
    assert shape.tiles in (shape.tokens, shape.tokens // 4)
    powers = [0, *(1 << power for power in range(7))]
    assert shape.full in powers or shape.full % CHOICE_CHUNK == 0
    assert packed.drafting in (0, *SIZES)


@pytest.mark.parametrize("max_step_tokens", [1, 7, 64, 100, 512, 5000])
def test_a_step_that_is_full_to_the_last_token_fits(max_step_tokens: int):
    """As few rows as there can be and as many, all drafting or none, all FULL."""
    for num_rows in {1, 3, min(256, max_step_tokens)}:
        layout = RoundLayout(num_rows, bucket(max_step_tokens))
        kinds = np.full(num_rows, FULL, dtype=np.int8)
        share, rest = divmod(max_step_tokens, num_rows)
        counts = [share + (row < rest) for row in range(num_rows)]
        for drafts in (0, 7):
            rows = [
                row_plan(slot, 5, max(count - drafts, 1), min(drafts, count - 1), ahead=False)
                for slot, count in enumerate(counts)
                if count
            ]
            packed, sections = packed_by(rows, layout, kinds)
            assert read(packed, sections, layout) == meant(rows)
            assert packed.shape.tokens == layout.tokens
            check_tiles(packed, sections, rows)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("start", [0, 1, 60, 127, 128, 500, 40_000])
def test_keys_are_divided_into_as_many_parts_as_the_longest_row_may_need(start: int, ahead: bool):
    rows = [row_plan(0, start, 1, 7, ahead=ahead), row_plan(1, 3, 1, 7, ahead=ahead)]
    packed, _ = packed_by(rows, RoundLayout(4, 64), np.zeros(4, dtype=np.int8))
    # Behind what the host knows may stand what a round in flight drafts: 63 tokens at most.
    furthest = start + 1 + 7 + (63 if ahead else 0)
    assert longest_of(StepPlan(tuple(rows))) >= furthest
    splits = packed.shape.num_splits
    assert splits == 0 or splits * ATTENTION_SPLIT >= furthest


def test_a_plan_at_another_length_differs_in_its_parts_alone():
    rows = [row_plan(0, 40, 1, 7, ahead=True)]
    layout, kinds = RoundLayout(4, 64), np.zeros(4, dtype=np.int8)
    packed, _ = packed_by(rows, layout, kinds)
    for start in (40, 41, 130, 700, 9000):
        later = [row_plan(0, start, 1, 7, ahead=True)]
        assert packed.at(longest_of(StepPlan(tuple(later))), 2) == packed_by(later, layout, kinds)[0]


def test_sizes_go_up_and_a_bucket_is_the_next_one():
    assert list(SIZES) == sorted(set(SIZES))
    assert bucket(0) == 0
    for num in range(1, 3 * SIZES[-1], 7):
        assert bucket(num) >= num
        assert bucket(num) == min((size for size in SIZES if size >= num), default=bucket(num))
        assert num <= SIZES[-1] or bucket(num) - num < SIZES[-1]
    for size in SIZES:
        for num in (0, 1, size // 4, size // 4 + 1, size):
            assert num <= part_of(size, num) <= size
