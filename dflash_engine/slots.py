"""What the device keeps of each running sequence, by slot: how far it is, its blocks, how it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_engine.choose import MIN_TEMPERATURE
from dflash_engine.ops import (
    WHOLE,
    SamplingTable,
    SlotState,
    request_key,
    reset_history,
    run_update_tables,
)
from dflash_engine.plan import RowPlan
from dflash_engine.request import SamplingParams
from dflash_engine.round_layout import FULL, PLAIN, WARM

WARM_TEMPERATURE = 1e-3
"""Below it, logits have to be taken from the best one down before they are divided."""
INT32_MAX = 2**31 - 1
"""More than any vocabulary has: a request may name a larger top-k."""


class SlotChanges(NamedTuple):
    """What the device does not know yet of the rows about to run."""

    tables: np.ndarray
    """int32 [N, 3]: slot, place in its block table, block."""
    placed: Sequence[RowPlan]
    """Rows that have taken their slot."""


class SlotTable:
    """Follows the rows of the plans: who holds a slot, and which of its blocks the device knows."""

    def __init__(self, num_slots: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self.kinds = np.zeros(num_slots, dtype=np.int8)
        self.num_placed = 0
        """Sequences that have taken a slot so far."""
        self.sampling = SamplingTable.empty(num_slots, vocab_size, device)
        self.state = SlotState(
            length=torch.zeros(num_slots, dtype=torch.int32, device=device),
            anchor=torch.zeros(num_slots, dtype=torch.int64, device=device),
            tables=torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device),
        )
        self._max_blocks = max_blocks
        self._device = device
        # A block table is the scheduler's own list, a new one whenever a sequence is placed.
        self._held: list[Sequence[int] | None] = [None] * num_slots
        self._num_known = [0] * num_slots

    def follow(self, rows: Sequence[RowPlan]) -> SlotChanges | None:
        """Brings the device's tables up to date with the rows about to run. Returns what was new in them, for
        other devices that follow."""
        updates: list[tuple[int, int, int]] = []
        placed: list[RowPlan] = []
        for row in rows:
            slot, table = row.slot, row.block_table
            if self._held[slot] is not table:
                self._held[slot] = table
                self._num_known[slot] = 0
                placed.append(row)
            known = self._num_known[slot]
            if known != len(table):
                assert len(table) <= self._max_blocks, (row.seq_id, len(table))
                updates.extend((slot, index, table[index]) for index in range(known, len(table)))
                self._num_known[slot] = len(table)
        if not updates and not placed:
            return None
        changes = SlotChanges(np.array(updates, dtype=np.int32).reshape(-1, 3), placed)
        self.apply(changes)
        return changes

    def apply(self, changes: SlotChanges) -> None:
        """Brings the device's tables up to date."""
        if len(changes.tables):
            run_update_tables(self._sent(changes.tables), self.state.tables)
        if changes.placed:
            self.num_placed += len(changes.placed)
            self._place(changes.placed)

    def _place(self, rows: Sequence[RowPlan]) -> None:
        kinds = [kind_of(row.sampling) for row in rows]
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        old = self.kinds[slots]
        self.kinds[slots] = kinds
        if not any(kinds) and not old.any():
            return
        at = self._sent(slots)
        params = [row.sampling for row in rows]
        whole = np.array(
            [
                (min(p.top_k, INT32_MAX), limit_of(p.top_p), request_key(row.seed), len(p.logit_bias))
                for p, row in zip(params, rows, strict=True)
            ],
            dtype=np.int64,
        )
        reals = np.array(
            [
                (heat_of(p), p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                for p in params
            ],
            dtype=np.float32,
        )
        table, integers, floats = self.sampling, self._sent(whole), self._sent(reals)
        table.top_k.index_copy_(0, at, integers[:, 0].int())
        table.top_p.index_copy_(0, at, integers[:, 1])
        table.key.index_copy_(0, at, integers[:, 2])
        table.num_bias.index_copy_(0, at, integers[:, 3].int())
        for column, values in enumerate(
            (table.temperature, table.min_p, table.repetition, table.presence, table.frequency)
        ):
            values.index_copy_(0, at, floats[:, column])
        for row in rows:
            if row.sampling.logit_bias:
                self._set_bias(row)
        penalised = [row for row in rows if row.sampling.penalised]
        if penalised:
            self._set_history(penalised)

    def _set_bias(self, row: RowPlan) -> None:
        bias = row.sampling.logit_bias
        num = len(bias)
        tokens = np.fromiter(bias, np.int32, num)
        values = np.fromiter(bias.values(), np.float32, num)
        self.sampling.bias_tokens[row.slot, :num] = self._sent(tokens)
        self.sampling.bias_values[row.slot, :num] = self._sent(values)

    def _set_history(self, rows: Sequence[RowPlan]) -> None:
        tokens = [np.array([*row.prompt, *row.output], dtype=np.int32) for row in rows]
        owner = np.repeat(np.arange(len(rows), dtype=np.int32), [len(part) for part in tokens])
        asked = np.concatenate(
            [np.arange(len(part)) < len(row.prompt) for part, row in zip(tokens, rows, strict=True)]
        )
        reset_history(
            self.sampling,
            self._sent(np.array([row.slot for row in rows], dtype=np.int32)),
            self._sent(np.concatenate(tokens)),
            self._sent(owner),
            self._sent(asked.astype(np.int8)),
        )

    def _sent(self, array: np.ndarray) -> Tensor:
        """The array on the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def kind_of(sampling: SamplingParams) -> int:
    plain = not sampling.logit_bias and not sampling.penalised
    if sampling.greedy:
        return PLAIN if plain else FULL
    whole = sampling.top_k == 0 and sampling.top_p >= 1 and sampling.min_p == 0
    return WARM if plain and whole and sampling.temperature >= WARM_TEMPERATURE else FULL


def heat_of(sampling: SamplingParams) -> float:
    return 0.0 if sampling.greedy else max(sampling.temperature, MIN_TEMPERATURE)


def limit_of(top_p: float) -> int:
    """top-p in the units in which probabilities are summed."""
    return max(int(top_p * WHOLE), 1)
