"""What a round has decided: how many drafted tokens stand, and where each sequence goes on from.

| what                     | written by                           | read by                                  |
|--------------------------|--------------------------------------|------------------------------------------|
| rows: a round's plan     | the host, before the round           | `accept`                                 |
| length, anchor of a slot | `accept` alone                       | the next round, without asking the host  |
| out, num_out             | `accept`, whole: unused places are 0 | the host, a round late                   |
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import MAX_DRAFT, SamplingTable, check


@dataclass(frozen=True, slots=True)
class AcceptRows:
    """A round's rows, each field int32 [R]; a slot has at most one row."""

    slot: Tensor
    """Below 0: padding."""
    start: Tensor
    """Position of the row's first fed token; below 0: the slot's length."""
    num_tokens: Tensor
    """Known tokens fed: a part of the prompt, or 1 for an anchor."""
    num_draft: Tensor
    """Drafted tokens fed behind them, below `MAX_DRAFT` and below the columns of `out`."""
    sample: Tensor
    """0 where more of the prompt follows: nothing is chosen."""
    first: Tensor
    """Index in `fed` of the row's first fed token."""
    first_choice: Tensor
    """Index in `chosen` of the choice behind the last known token; those behind drafted tokens follow."""


def accept(
    rows: AcceptRows,
    chosen: Tensor,
    fed: Tensor,
    length: Tensor,
    anchor: Tensor,
    table: SamplingTable,
    out: Tensor,
    num_out: Tensor,
) -> None:
    """Accept of each row's drafted tokens the longest prefix that the target chose as well, and one more.

    `chosen` is int32 [W], `fed` int64 [T]. Written: `out` int32 [R, most + 1], the tokens given out;
    `num_out` int32 [R]; and by slot `length` int32 [S], the positions whose keys and values are final,
    `anchor` int64 [S], the token at that position, and the counts of slots with penalties.
    Raises `ValueError`.
    """
    num_rows, columns = check_accept(rows, chosen, fed, length, anchor, table, out, num_out)
    if num_rows:
        _accept_kernel[(num_rows,)](
            *(getattr(rows, field.name) for field in fields(rows)),
            chosen,
            fed,
            length,
            anchor,
            table.repetition,
            table.presence,
            table.frequency,
            table.counts,
            table.counts.shape[1],
            out,
            columns,
            num_out,
            MAX_DRAFT=MAX_DRAFT,
            num_warps=1,
        )


def check_accept(
    rows: AcceptRows,
    chosen: Tensor,
    fed: Tensor,
    length: Tensor,
    anchor: Tensor,
    table: SamplingTable,
    out: Tensor,
    num_out: Tensor,
) -> tuple[int, int]:
    """Rows and columns of `out`. Raises `ValueError` that names the argument that does not fit."""
    num_rows, columns = (*out.shape, 0, 0)[:2]
    if not 1 <= columns <= MAX_DRAFT:
        raise ValueError(f"out needs 1 to {MAX_DRAFT} columns, has shape {tuple(out.shape)}")
    for field in fields(rows):
        check(f"rows.{field.name}", getattr(rows, field.name), torch.int32, num_rows)
    check("out", out, torch.int32, num_rows, columns)
    check("num_out", num_out, torch.int32, num_rows)
    check("chosen", chosen, torch.int32, chosen.numel())
    check("fed", fed, torch.int64, fed.numel())
    slots = table.counts.shape[0]
    check("length", length, torch.int32, slots)
    check("anchor", anchor, torch.int64, slots)
    for name in ("repetition", "presence", "frequency"):
        check(f"table.{name}", getattr(table, name), torch.float32, slots)
    check("table.counts", table.counts, torch.int16, *table.counts.shape)
    return num_rows, columns


@triton.jit
def _accept_kernel(
    slots,
    starts,
    nums_tokens,
    nums_draft,
    samples,
    firsts,
    first_choices,
    chosen,
    fed,
    length,
    anchor,
    repetitions,
    presences,
    frequencies,
    counts,
    vocab_size,
    out,
    columns,
    num_out,
    MAX_DRAFT: tl.constexpr,
):
    """One row: the number accepted is the first i < num_draft with draft[i] != choice[i], or num_draft.

    draft[i] = fed[first + num_tokens + i], choice[i] = chosen[first_choice + i].
    """
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r).to(tl.int64)
    i = tl.arange(0, MAX_DRAFT)
    tokens = tl.zeros([MAX_DRAFT], tl.int32)
    given = 0
    if slot >= 0:
        start = tl.load(starts + r)
        base = tl.where(start >= 0, start, tl.load(length + slot))
        num_tokens = tl.load(nums_tokens + r)
        end = base + num_tokens
        if tl.load(samples + r) != 0:
            num_draft = tl.load(nums_draft + r)
            drafted = fed + tl.load(firsts + r).to(tl.int64) + num_tokens
            choices = chosen + tl.load(first_choices + r).to(tl.int64)
            draft = tl.load(drafted + i, mask=i < num_draft, other=-1)
            choice = tl.load(choices + i, mask=i <= num_draft, other=0)
            wrong = (i >= num_draft) | (draft != choice)
            accepted = tl.min(tl.where(wrong, i, MAX_DRAFT - 1), 0)
            given = accepted + 1
            tokens = tl.where(i <= accepted, choice, 0)
            end += accepted
            tl.store(anchor + slot, tl.sum(tl.where(i == accepted, choice, 0), 0).to(tl.int64))
            repetition = tl.load(repetitions + slot)
            presence = tl.load(presences + slot)
            frequency = tl.load(frequencies + slot)
            if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
                _count(counts + slot * vocab_size, choice, i <= accepted)
        # Every thread has to have read the old length.
        tl.debug_barrier()
        tl.store(length + slot, end)
    tl.store(out + r * columns + i, tokens, mask=i < columns)
    tl.store(num_out + r, given)


@triton.jit
def _count(counts, tokens, valid):
    """Add each valid token's number of occurrences to its count; equal tokens write the same sum."""
    equal = (tokens[:, None] == tokens[None, :]) & valid[None, :]
    count = tl.load(counts + tokens, mask=valid, other=0).to(tl.int32) + tl.sum(equal.to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(counts + tokens, tl.minimum(count, 32767).to(tl.int16), mask=valid)


def accept_reference(
    rows: AcceptRows,
    chosen: Tensor,
    fed: Tensor,
    length: Tensor,
    anchor: Tensor,
    table: SamplingTable,
    out: Tensor,
    num_out: Tensor,
) -> None:
    """`accept` in plain words."""
    check_accept(rows, chosen, fed, length, anchor, table, out, num_out)
    out.zero_()
    num_out.zero_()
    plan = torch.stack([getattr(rows, field.name) for field in fields(rows)], dim=1).tolist()
    for r, (slot, start, num_tokens, num_draft, sample, first, first_choice) in enumerate(plan):
        if slot < 0:
            continue
        end = (start if start >= 0 else int(length[slot])) + num_tokens
        if sample:
            draft = fed[first + num_tokens :][:num_draft].tolist()
            choices = chosen[first_choice:][: num_draft + 1].tolist()
            accepted = 0
            while accepted < num_draft and draft[accepted] == choices[accepted]:
                accepted += 1
            given = choices[: accepted + 1]
            out[r, : len(given)] = torch.tensor(given)
            num_out[r] = len(given)
            anchor[slot] = given[-1]
            end += accepted
            if table.repetition[slot] != 1 or table.presence[slot] != 0 or table.frequency[slot] != 0:
                for token in given:
                    table.counts[slot, token] += 1
        length[slot] = end
