"""Acceptance length on the target's own greedy answers, without generating.

A greedy answer does not depend on how it was drafted. So what the draft would guess at each position of a
known answer can be computed for all positions at once, and the rounds that the engine would have made are
then counted by walking from anchor to anchor. On greedy answers that is the engine's own figure, up to ties
of logits; on sampled ones it is lower.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_engine.accepted import Accepted
from dflash_engine.training.draft_forward import draft_hidden
from dflash_engine.training.features import compute
from dflash_engine.training.packing import PackedRows
from dflash_engine.training.plans import anchors_of_all
from dflash_engine.training.step import DeviceRows, TrainStep
from dflash_engine.training.target import Target


class HeldOut:
    """Sequences of one name with their features, and how a draft in training fares on them."""

    def __init__(
        self, rows: PackedRows, target: Target, step: TrainStep, eos_token_ids: Sequence[int]
    ) -> None:
        self._rows, self._step, self._stops = rows, step, frozenset(eos_token_ids)
        device = step.features.device
        self._device_rows = DeviceRows.of(rows, device)
        self._features = torch.zeros(
            (*rows.tokens.shape, step.features.shape[-1]), dtype=step.features.dtype, device=device
        )
        compute(target, rows, step.config.target_layer_ids, self._features)

    def measure(self) -> Accepted:
        matched = self._matched()
        result = Accepted(self._step.config.block_size)
        for row, column, length, prompt, _ in self._rows.sequences:
            stopped = int(self._rows.tokens[row, column + length - 1]) in self._stops
            walk(matched[row, column + prompt : column + length], stopped, result)
        return result

    @torch.no_grad()
    def _matched(self) -> NDArray[np.int64]:
        """[R, S]: how many of the guesses of a block anchored there are right, from the first on."""
        step, rows = self._step, self._rows
        weights = step.weights()
        found = np.zeros(rows.labels.shape, np.int64)
        num_rows, num_anchors = step.features.shape[0], step.num_anchors
        for plan, counts in anchors_of_all(rows.labels, num_rows, num_anchors):
            numbers = torch.from_numpy(plan.rows).to(self._features.device)
            anchors = torch.from_numpy(plan.anchors.astype(np.int64)).to(self._features.device)
            features = self._features.index_select(0, numbers)
            blocks, labels = step.maker.make(self._device_rows, numbers, anchors, features)
            hidden = draft_hidden(weights, step.config, blocks)
            guesses = best_tokens(hidden.flatten(0, 2), step.frozen.head).view(labels.tokens.shape)
            right = (guesses == labels.tokens).long().cumprod(-1).sum(-1)
            reached = right.minimum(labels.lefts).cpu().numpy()
            places = np.broadcast_to(plan.rows[:, None], counts.shape)[counts]
            found[places, plan.anchors[counts]] = reached[counts]
        return found


def walk(matched: Sequence[int] | NDArray[np.int64], stopped: bool, into: Accepted) -> None:
    """Counts the rounds of one answer; matched [response tokens].

    The first token is prefill's. A round commits what it accepted and the target's own token; where the
    answer ends by length, nothing is drafted beyond the last token but one, as in the engine.
    """
    at, last = 0, len(matched) - 1
    drafted_most = len(into.histogram) - 1
    while at < last:
        room = last - at if stopped else last - at - 1
        accepted = min(int(matched[at]), room)
        drafted = drafted_most if stopped else min(drafted_most, room)
        into.add(drafted, accepted)
        at += accepted + 1


def best_tokens(hidden: Tensor, head: Tensor, rows: int = 4096) -> Tensor:
    """int64 [T]: first best token of each of the normed hidden states [T, H], from float32 logits."""
    wide = head.float().T
    return torch.cat([(part.float() @ wide).argmax(-1) for part in hidden.split(rows)])
