"""A step's plan as integers for the device: one array, one copy, one place that says what stands where."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from dflash_engine.batching import tiles_of
from dflash_engine.ops import ANCHOR, ATTENTION_SPLIT, DRAFTED
from dflash_engine.plan import StepPlan

Array = TypeVar("Array", np.ndarray, Tensor)

PLAIN, WARM, FULL = 0, 1, 2
"""How a request chooses: the best token; with noise; with all that `SamplingParams` has."""
SIZES = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096),
)
"""Query tokens of a captured round: what is between two sizes is filled up with padding, or with drafts."""
CHOICE_CHUNK = 64
"""Rows whose whole logits are held at a time."""


class Sections(NamedTuple, Generic[Array]):
    """Views of the array: int32 by row [rows], by fed token [tokens], by choice [tokens]."""

    slot: Array
    start: Array
    num_tokens: Array
    num_draft: Array
    sample: Array
    first: Array
    first_choice: Array
    draft_row: Array
    draft_slot: Array
    draft_start: Array
    draft_anchor: Array
    codes: Array
    token_row: Array
    choice_row: Array
    choice_offset: Array
    tiles: Array
    """[2 tokens]: (first row, rows) of each attention tile."""
    full: Array
    """[tokens + CHOICE_CHUNK]: choices of rows that are FULL."""


_NUM_BY_ROW = 11


@dataclass(frozen=True, slots=True)
class RoundLayout:
    """Capacities of the array."""

    rows: int
    tokens: int

    @property
    def sizes(self) -> tuple[int, ...]:
        by_token = (self.tokens,) * 4
        return (*(self.rows,) * _NUM_BY_ROW, *by_token, 2 * self.tokens, self.tokens + CHOICE_CHUNK)

    def sections(self, array: Array) -> Sections[Array]:
        views, at = [], 0
        for size in self.sizes:
            views.append(array[at : at + size])
            at += size
        return Sections(*views)


class Shape(NamedTuple):
    """What a captured round depends on: everything rounded up to few sizes."""

    tokens: int
    choices: int
    tiles: int
    tile_tokens: int
    num_splits: int
    noise: bool
    full: int
    """Choices of FULL rows, in multiples of CHOICE_CHUNK or a power of two below it."""
    taps: bool


class Packed(NamedTuple):
    shape: Shape
    drafting: int
    """Rows that draft, rounded up; 0 for none."""
    draft_noise: bool

    def at(self, longest: int, kv_heads: int) -> Packed:
        """The same plan with sequences of this length."""
        tiles = self.shape.tiles
        splits = splits_of(tiles * kv_heads, tiles * self.shape.tile_tokens, longest)
        return (
            self
            if splits == self.shape.num_splits
            else self._replace(shape=self.shape._replace(num_splits=splits))
        )


def longest_of(plan: StepPlan) -> int:
    """Positions that the longest sequence may have behind the step."""
    return max([row.start + row.num_tokens + row.num_draft for row in plan.rows]) + _AHEAD


def bucket(num: int) -> int:
    """The next size up of which graphs are made; 0 for none."""
    if num <= SIZES[-1]:
        return SIZES[bisect_left(SIZES, num)] if num else 0
    return -(-num // SIZES[-1]) * SIZES[-1]


def pack(
    plan: StepPlan,
    layout: RoundLayout,
    into: Sections[np.ndarray],
    kinds: np.ndarray,
    group: int,
    kv_heads: int,
    block_length: int,
) -> Packed:
    """Writes the plan into the array. `kinds` has PLAIN, WARM or FULL by slot; attention tiles are made for
    single rows, blocks of `block_length` or prompts."""
    rows = plan.rows
    num = len(rows)

    def column(values: object) -> np.ndarray:
        return np.fromiter(values, np.int32, num)  # type: ignore[call-overload,no-any-return]

    slot = column(row.slot for row in rows)
    num_tokens = column(row.num_tokens for row in rows)
    num_draft = column(row.num_draft for row in rows)
    sample = column(row.sample for row in rows)
    counts = num_tokens + num_draft
    total = int(counts.sum())
    first = np.cumsum(counts, dtype=np.int32) - counts
    shown = np.where(sample > 0, num_draft + 1, 0).astype(np.int32)
    num_choices = int(shown.sum())
    first_choice = np.cumsum(shown, dtype=np.int32) - shown
    tokens = bucket(total)
    assert total <= layout.tokens and num <= layout.rows, (total, num)
    padded_rows = min(tokens, layout.rows)
    into.slot[num:padded_rows] = -1
    start = column(-1 if row.ahead else row.start for row in rows)
    for name, values in (
        ("slot", slot),
        ("start", start),
        ("num_tokens", num_tokens),
        ("num_draft", num_draft),
        ("sample", sample),
        ("first", first),
        ("first_choice", first_choice),
    ):
        getattr(into, name)[:num] = values
    drafting = _pack_drafts(plan, into, slot, start, num_draft)
    _pack_tokens(plan, into, counts, num_tokens, first, total, tokens)
    choices = part_of(tokens, num_choices)
    row_of = np.repeat(np.arange(num, dtype=np.int32), shown)
    into.choice_row[:num_choices] = row_of
    into.choice_row[num_choices:choices] = -1
    into.choice_offset[:num_choices] = np.arange(num_choices) - first_choice[row_of]
    kind = kinds[slot[row_of]]
    full = np.flatnonzero(kind == FULL)
    num_full = len(full)
    padded_full = (
        0
        if not num_full
        else 1 << (num_full - 1).bit_length()
        if num_full <= CHOICE_CHUNK
        else -(-num_full // CHOICE_CHUNK) * CHOICE_CHUNK
    )
    into.full[:num_full] = full
    into.full[num_full:padded_full] = -1
    tiles, tile_tokens = tiles_of(counts, group, block_length)
    num_tiles = part_of(tokens, len(tiles))
    flat = into.tiles[: 2 * num_tiles].reshape(-1, 2)
    flat[: len(tiles)] = tiles
    flat[len(tiles) :] = 0
    shape = Shape(
        tokens=tokens,
        choices=choices,
        tiles=num_tiles,
        tile_tokens=tile_tokens,
        num_splits=splits_of(num_tiles * kv_heads, num_tiles * tile_tokens, longest_of(plan)),
        noise=bool((kind == WARM).any()),
        full=padded_full,
        taps=plan.write_context,
    )
    noise = bool((kinds[slot[num_draft > 0]] != PLAIN).any())
    return Packed(shape, bucket(drafting), noise)


_AHEAD = 64
"""Positions that a row planned ahead may stand behind the least that it can."""
_PROGRAMS = 264
"""Two for each multiprocessor: with so many tiles their keys need no dividing."""
_PART_ROWS = 16_384
"""Rows times parts for which partial sums are kept."""


def splits_of(programs: int, rows: int, longest: int) -> int:
    """Parts that a tile's keys are divided into; 0 for one program a tile."""
    needed = -(-longest // ATTENTION_SPLIT)
    splits = 4
    while splits < needed:
        splits *= 4
    return splits if needed > 1 and programs < _PROGRAMS and rows * splits <= _PART_ROWS else 0


def part_of(size: int, num: int) -> int:
    """A quarter of the size where that is enough, else all of it: few sizes make few graphs."""
    return size // 4 if size >= 8 and num <= size // 4 else size


def _pack_drafts(
    plan: StepPlan, into: Sections[np.ndarray], slot: np.ndarray, start: np.ndarray, num_draft: np.ndarray
) -> int:
    at = np.flatnonzero(num_draft)
    num = len(at)
    into.draft_row[: len(num_draft)] = 0
    into.draft_row[at] = np.arange(num)
    into.draft_slot[:num] = slot[at]
    into.draft_slot[num : bucket(num)] = -1
    into.draft_start[:num] = start[at]
    into.draft_anchor[:num] = [0 if plan.rows[row].ahead else plan.rows[row].tokens[-1] for row in at]
    return num


def _pack_tokens(
    plan: StepPlan,
    into: Sections[np.ndarray],
    counts: np.ndarray,
    num_tokens: np.ndarray,
    first: np.ndarray,
    total: int,
    padded: int,
) -> None:
    """Codes of what is fed: known tokens as they are, the device's own by ANCHOR and DRAFTED."""
    row_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    behind = np.arange(total, dtype=np.int32) - first[row_of] - num_tokens[row_of]
    into.token_row[:total] = row_of
    into.token_row[total:padded] = -1
    into.codes[:total] = np.where(behind >= 0, DRAFTED - behind, ANCHOR)
    for row, at in zip(plan.rows, first.tolist(), strict=True):
        if not row.ahead:
            into.codes[at : at + len(row.tokens)] = row.tokens
