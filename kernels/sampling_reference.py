"""The definition of `kernels.sampling` in plain torch, row by row and with a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.noise import gumbel_reference
from kernels.sampling import WHOLE, SamplingTable


def choose_reference(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    fed: Tensor,
    fed_index: Tensor,
    num_before: Tensor,
    table: SamplingTable,
) -> Tensor:
    """See `kernels.sampling.choose`; leaves the logits as they are."""
    chosen = torch.zeros(len(slots), dtype=torch.int32, device=logits.device)
    plan = torch.stack([slots, positions, fed_index, num_before], dim=1).tolist()
    for w, (slot, position, last, before) in enumerate(plan):
        if slot < 0:
            continue
        scores = _penalised(_biased(logits[w], slot, table), fed[last + 1 - before : last + 1], slot, table)
        if table.temperature[slot] > 0:
            scores = _truncated((scores - scores.max()) / table.temperature[slot], slot, table)
            noise = gumbel_reference(int(table.key[slot]), position, len(scores), scores.device)
            scores = scores + noise
        chosen[w] = scores.argmax()
    return chosen


def _biased(logits: Tensor, slot: int, table: SamplingTable) -> Tensor:
    number = int(table.num_bias[slot])
    return logits.index_add(0, table.bias_tokens[slot, :number], table.bias_values[slot, :number])


def _penalised(scores: Tensor, drafted: Tensor, slot: int, table: SamplingTable) -> Tensor:
    counts = table.counts[slot].float() + torch.bincount(drafted, minlength=len(scores))
    penalty = table.repetition[slot]
    damped = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = torch.where((table.seen[slot] != 0) | (counts > 0), damped, scores)
    return scores - table.frequency[slot] * counts - table.presence[slot] * (counts > 0)


def _truncated(scores: Tensor, slot: int, table: SamplingTable) -> Tensor:
    """-inf for tokens outside min-p, then top-k, then top-p; of equals, the lower token id stays."""
    probabilities = scores.softmax(-1)
    scores = scores.masked_fill(probabilities < table.min_p[slot] * probabilities.max(), -torch.inf)
    ordered, tokens = scores.sort(descending=True, stable=True)
    if table.top_k[slot] > 0:
        ordered[int(table.top_k[slot]) :] = -torch.inf
    if table.top_p[slot] < WHOLE:
        shares = (ordered.softmax(-1).double() * WHOLE).long()
        ordered[shares.cumsum(0) - shares >= table.top_p[slot]] = -torch.inf
    return torch.full_like(scores, -torch.inf).scatter(0, tokens, ordered)


def reset_history_reference(
    table: SamplingTable, slots: Tensor, tokens: Tensor, token_row: Tensor, is_prompt: Tensor
) -> None:
    """See `kernels.sampling.reset_history`."""
    for slot in slots.tolist():
        if slot >= 0:
            table.counts[slot] = 0
            table.seen[slot] = 0
    for token, row, asked in zip(tokens.tolist(), token_row.tolist(), is_prompt.tolist(), strict=True):
        if row >= 0 and asked:
            table.seen[slots[row], token] = 1
        elif row >= 0:
            table.counts[slots[row], token] += 1
