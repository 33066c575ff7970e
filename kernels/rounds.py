"""The index tensors of a round, made on the device: where sequences are is known there first.

The host packs a plan as integers (what is fed for which row); positions come from the slots' lengths,
anchors and drafted tokens from the rounds before, KV cells from the block tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ANCHOR = -1
DRAFTED = -2
"""Code of a token that the device knows: the slot's anchor; DRAFTED - i: the row's i-th drafted token."""
_BLOCK = 128


class SlotState(NamedTuple):
    """By slot [S]; see `kernels.accept` for who writes what."""

    length: Tensor
    """int32 [S]"""
    anchor: Tensor
    """int64 [S]"""
    tables: Tensor
    """int32 [S, blocks]"""


class PlanRows(NamedTuple):
    """int32 [R] each: rows of the round, as `kernels.accept.AcceptRows`, and their row of `drafts`."""

    slot: Tensor
    start: Tensor
    num_tokens: Tensor
    num_draft: Tensor
    sample: Tensor
    first: Tensor
    first_choice: Tensor
    draft_row: Tensor


class DraftBlocks(NamedTuple):
    """int32 [R] each: the rows that draft."""

    slot: Tensor
    """-1: padding"""
    start: Tensor
    """Position of the anchor where the host knows it, else -1: the slot's length."""
    anchor: Tensor
    """The anchor where `start` is known."""


class Feed(NamedTuple):
    """What the target is fed, [T] each, and what of its rows is chosen from, [W] and [F] each."""

    tokens: Tensor
    """int64"""
    positions: Tensor
    """int32"""
    cells: Tensor
    """int64, into a layer's cache; rows of padding write to the cell behind the last block"""
    sequence: Tensor
    """int32, row of the tables"""
    begin: Tensor
    """int32 [spans, T]"""
    end: Tensor
    """int32 [spans, T]"""


class Choices(NamedTuple):
    """By choice, [N] each; `slot` is -1 for padding."""

    slot: Tensor
    """int32"""
    position: Tensor
    """int32, of the token to be chosen"""
    hidden: Tensor
    """int64, row of the fed tokens"""
    fed_index: Tensor
    """int32, the same"""
    num_before: Tensor
    """int32, drafted tokens up to there"""


@triton.jit(do_not_specialize_on_alignment=["T"])
def _feed_kernel(
    codes, token_row, slots, starts, firsts, draft_rows, length, anchor, tables, table_stride, drafts,
    draft_stride, tokens, positions, cells, sequence, begin, end, windows, T, block_size, padding_cell,
    SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of fed tokens; begin and end of a causal span [SPANS, T] with its window (0: none)."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t_ok = t < T
    row = tl.load(token_row + t, mask=t_ok, other=-1)
    known = t_ok & (row >= 0)
    slot = tl.load(slots + row, mask=known, other=0).to(tl.int64)
    start = tl.load(starts + row, mask=known, other=0)
    base = tl.where(start >= 0, start, tl.load(length + slot, mask=known, other=0))
    position = base + t - tl.load(firsts + row, mask=known, other=0)
    code = tl.load(codes + t, mask=known, other=0)
    place = tl.load(draft_rows + row, mask=known, other=0).to(tl.int64) * draft_stride - 2 - code
    drafted = tl.load(drafts + place, mask=known & (code <= -2), other=0).to(tl.int64)
    anchored = tl.load(anchor + slot, mask=known & (code == -1), other=0)
    token = tl.where(code >= 0, code.to(tl.int64), tl.where(code == -1, anchored, drafted))
    block = tl.load(tables + slot * table_stride + position // block_size, mask=known, other=0).to(tl.int64)
    cell = tl.where(known, block * block_size + position % block_size, padding_cell)
    tl.store(tokens + t, tl.where(known, token, 0), mask=t_ok)
    tl.store(positions + t, tl.where(known, position, 0), mask=t_ok)
    tl.store(cells + t, cell, mask=t_ok)
    tl.store(sequence + t, tl.where(known, slot, 0).to(tl.int32), mask=t_ok)
    for span in tl.static_range(SPANS):
        window = tl.load(windows + span)
        first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
        tl.store(begin + span * T + t, tl.where(known, first, 0), mask=t_ok)
        tl.store(end + span * T + t, tl.where(known, position + 1, 0), mask=t_ok)


@triton.jit(do_not_specialize_on_alignment=["N"])
def _choices_kernel(
    rows, offsets, slots, starts, nums_tokens, firsts, length, chosen_slot, position, hidden, fed_index,
    num_before, N, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choice n of row rows[n] is the one behind its offsets[n]-th drafted token."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n_ok = n < N
    row = tl.load(rows + n, mask=n_ok, other=-1)
    known = n_ok & (row >= 0)
    slot = tl.load(slots + row, mask=known, other=0).to(tl.int64)
    start = tl.load(starts + row, mask=known, other=0)
    base = tl.where(start >= 0, start, tl.load(length + slot, mask=known, other=0))
    num_tokens = tl.load(nums_tokens + row, mask=known, other=0)
    offset = tl.load(offsets + n, mask=known, other=0)
    index = tl.load(firsts + row, mask=known, other=0) + num_tokens - 1 + offset
    tl.store(chosen_slot + n, tl.where(known, slot.to(tl.int32), -1), mask=n_ok)
    tl.store(position + n, tl.where(known, base + num_tokens + offset, 0), mask=n_ok)
    tl.store(hidden + n, tl.where(known, index, 0).to(tl.int64), mask=n_ok)
    tl.store(fed_index + n, tl.where(known, index, 0), mask=n_ok)
    tl.store(num_before + n, tl.where(known, offset, 0), mask=n_ok)


@triton.jit(do_not_specialize_on_alignment=["T"])
def _draft_feed_kernel(
    draft_slots, starts, anchors, length, anchor, tables, table_stride, tokens, positions, cells, sequence,
    begin, end, tiles, windows, causal, mask_token, T, block_length, block_size, padding_cell,
    SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks [anchor, mask, ...] of the drafting rows, behind their lengths."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t_ok = t < T
    row, offset = t // block_length, t % block_length
    slot = tl.load(draft_slots + row, mask=t_ok, other=-1).to(tl.int64)
    known = t_ok & (slot >= 0)
    start = tl.load(starts + row, mask=known, other=0)
    base = tl.where(start >= 0, start, tl.load(length + slot, mask=known, other=0))
    position = base + offset
    token = tl.load(anchor + slot, mask=known & (offset == 0), other=0)
    given = tl.load(anchors + row, mask=known & (offset == 0), other=0)
    token = tl.where(start >= 0, given.to(tl.int64), token)
    block = tl.load(tables + slot * table_stride + position // block_size, mask=known, other=0).to(tl.int64)
    cell = tl.where(known, block * block_size + position % block_size, padding_cell)
    tl.store(tokens + t, tl.where(known & (offset > 0), mask_token, token), mask=t_ok)
    tl.store(positions + t, tl.where(known, position, 0), mask=t_ok)
    tl.store(cells + t, cell, mask=t_ok)
    tl.store(sequence + t, tl.where(known, slot, 0).to(tl.int32), mask=t_ok)
    head = t_ok & (offset == 0)
    tl.store(tiles + 2 * row, t, mask=head)
    tl.store(tiles + 2 * row + 1, tl.where(known, block_length, 0), mask=head)
    for span in tl.static_range(SPANS):
        window = tl.load(windows + span)
        first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
        last = tl.where(tl.load(causal + span) > 0, position + 1, base + block_length)
        tl.store(begin + span * T + t, tl.where(known, first, 0), mask=t_ok)
        tl.store(end + span * T + t, tl.where(known, last, 0), mask=t_ok)


@triton.jit(do_not_specialize=["num"])
def _update_tables_kernel(updates, num, tables, table_stride, BLOCK: tl.constexpr):
    """tables[slot, index] = block for each (slot, index, block)."""
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(updates + 3 * u, mask=u < num, other=0).to(tl.int64)
    index = tl.load(updates + 3 * u + 1, mask=u < num, other=0)
    block = tl.load(updates + 3 * u + 2, mask=u < num, other=0)
    tl.store(tables + slot * table_stride + index, block, mask=u < num)


def run_feed(
    codes: Tensor,
    token_row: Tensor,
    rows: PlanRows,
    state: SlotState,
    drafts: Tensor,
    feed: Feed,
    windows: Tensor,
    block_size: int,
    padding_cell: int,
) -> None:
    """Fills `feed` for codes and token_row int32 [T] (-1: padding), drafts int32 [rows, drafted].

    windows int32 [spans]: each span's sliding window, 0 for none; all are causal.
    """
    _same_length("codes", codes, token_row, feed.tokens, feed.positions, feed.cells, feed.sequence)
    _feed_kernel[(triton.cdiv(len(codes), _BLOCK),)](
        codes, token_row, rows.slot, rows.start, rows.first, rows.draft_row, state.length, state.anchor,
        state.tables, state.tables.stride(0), drafts, drafts.stride(0), feed.tokens, feed.positions,
        feed.cells, feed.sequence, feed.begin, feed.end, windows, len(codes), block_size, padding_cell,
        SPANS=len(windows), BLOCK=_BLOCK,
    )  # fmt: skip


def run_choices(rows_of: Tensor, offsets: Tensor, rows: PlanRows, state: SlotState, choices: Choices) -> None:
    """Fills `choices` for rows_of int32 [N] (-1: padding) and offsets int32 [N], drafted tokens before."""
    _same_length("rows_of", rows_of, offsets, *choices)
    _choices_kernel[(triton.cdiv(len(rows_of), _BLOCK),)](
        rows_of, offsets, rows.slot, rows.start, rows.num_tokens, rows.first, state.length, *choices,
        len(rows_of), BLOCK=_BLOCK,
    )  # fmt: skip


def run_draft_feed(
    blocks: DraftBlocks,
    state: SlotState,
    feed: Feed,
    tiles: Tensor,
    spans: tuple[Tensor, Tensor],
    mask_token: int,
    block_length: int,
    block_size: int,
    padding_cell: int,
) -> None:
    """Fills `feed` and tiles int32 [R, 2] for the blocks of R rows, T = R block_length.

    spans: windows (0: none) and causal (0 or 1), int32 [spans] each.
    """
    _same_length("draft slots", *blocks)
    if len(feed.tokens) != len(blocks.slot) * block_length or tiles.shape != (len(blocks.slot), 2):
        raise ValueError(f"{len(blocks.slot)} blocks of {block_length} do not fill {len(feed.tokens)} tokens")
    _draft_feed_kernel[(triton.cdiv(len(feed.tokens), _BLOCK),)](
        *blocks, state.length, state.anchor, state.tables, state.tables.stride(0), *feed, tiles, *spans,
        mask_token, len(feed.tokens), block_length, block_size, padding_cell,
        SPANS=len(spans[0]), BLOCK=_BLOCK,
    )  # fmt: skip


def run_update_tables(updates: Tensor, tables: Tensor) -> None:
    """Writes block ids into tables int32 [S, blocks]: updates int32 [U, 3] of (slot, index, block)."""
    if updates.dim() != 2 or updates.shape[1] != 3 or updates.dtype != torch.int32:
        raise ValueError(f"updates is {updates.dtype} {tuple(updates.shape)}, not int32 [updates, 3]")
    if len(updates):
        _update_tables_kernel[(triton.cdiv(len(updates), _BLOCK),)](
            updates, len(updates), tables, tables.stride(0), BLOCK=_BLOCK
        )


def _same_length(name: str, first: Tensor, *others: Tensor) -> None:
    for other in others:
        if len(other) != len(first):
            raise ValueError(f"{name} has {len(first)} entries, another index {len(other)}")
