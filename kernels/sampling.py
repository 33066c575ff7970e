"""The target's choice of a token for each row of logits, with every request's own parameters, on the GPU.

Semantics are those of the engine's choice on the host: logit bias, penalties, temperature, min-p, top-k,
top-p, then the best score, with a temperature after Gumbel noise is added.

| what                               | written by                                  | read by            |
|------------------------------------|---------------------------------------------|--------------------|
| parameters of a slot               | the runner, when a sequence takes the slot  | `choose`, `accept` |
| counts, seen of a slot             | `reset_history`, when a sequence takes it   | `choose`           |
| counts of a slot, token by token   | `accept`, as tokens are given out           | `choose`           |
| drafted tokens before a choice     | nobody: `choose` counts them itself in `fed`| `choose`           |
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.choice import choose_kernel
from kernels.truncation import MAX_COUNT

MAX_BIAS = 1024
MAX_DRAFT = 64
"""Drafted tokens that can stand before a choice."""
WHOLE = 1 << 40
"""A probability of one, in the units in which top-p is given and summed."""
_BLOCK = 4096
_WARPS = 16
_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Parameters and token counts by slot [S], on the device. Floats are a request's, rounded to float32."""

    temperature: Tensor
    """float32 [S]; 0 takes the best token. A tiny one is stored as 1e-30, or it would be 0."""
    top_k: Tensor
    """int32 [S]; 0 keeps all."""
    top_p: Tensor
    """int64 [S]: max(int(top_p * 2^40), 1); 2^40 or more keeps all."""
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    """float32 [S] each; 0, 1, 0 and 0 change nothing."""
    key: Tensor
    """int64 [S]: `request_key(seed)`."""
    num_bias: Tensor
    """int32 [S], at most `MAX_BIAS`."""
    bias_tokens: Tensor
    """int32 [S, MAX_BIAS], each token once."""
    bias_values: Tensor
    """float32 [S, MAX_BIAS]"""
    counts: Tensor
    """int16 [S, V]: how often a token was answered."""
    seen: Tensor
    """int8 [S, V]: 1 where the token is in the prompt."""

    @classmethod
    def empty(cls, num_slots: int, vocab_size: int, device: torch.device) -> SamplingTable:
        """Greedy slots without penalties, bias and history."""

        def full(value: float, dtype: torch.dtype, *width: int) -> Tensor:
            return torch.full((num_slots, *width), value, dtype=dtype, device=device)

        # One more: counts are added in pairs, as 32-bit integers.
        counts = torch.zeros(num_slots * vocab_size + 1, dtype=torch.int16, device=device)
        return cls(
            temperature=full(0, torch.float32),
            top_k=full(0, torch.int32),
            top_p=full(WHOLE, torch.int64),
            min_p=full(0, torch.float32),
            repetition=full(1, torch.float32),
            presence=full(0, torch.float32),
            frequency=full(0, torch.float32),
            key=full(0, torch.int64),
            num_bias=full(0, torch.int32),
            bias_tokens=full(0, torch.int32, MAX_BIAS),
            bias_values=full(0, torch.float32, MAX_BIAS),
            counts=counts[:-1].view(num_slots, vocab_size),
            seen=full(0, torch.int8, vocab_size),
        )

    @property
    def bytes(self) -> int:
        tensors: list[Tensor] = [getattr(self, field.name) for field in fields(self)]
        return sum(tensor.nbytes for tensor in tensors)


def check(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raises `ValueError` that names the argument unless it is a contiguous tensor of this type and shape."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} needs to be contiguous {dtype} of shape {shape}, is {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def choose(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    fed: Tensor,
    fed_index: Tensor,
    num_before: Tensor,
    table: SamplingTable,
) -> Tensor:
    """int32 [W]: the token that each row's request chooses from float32 `logits` [W, V], which it destroys.

    Row w belongs to slot `slots[w]` (int32 [W]; below 0: padding, its choice is 0) and chooses the token
    of `positions[w]` (int32 [W]), the one behind `fed[fed_index[w]]` (int64 [T], int32 [W]). The last
    `num_before[w]` (int32 [W], at most `MAX_DRAFT`) fed tokens up to there are drafted ones; they count
    as answered. Raises `ValueError`.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(
            f"logits needs to be float32 [W, V] with V contiguous, is {logits.dtype} of shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )
    rows, vocab_size = logits.shape
    if not 1 < vocab_size <= MAX_COUNT.value:
        raise ValueError(f"logits has {vocab_size} columns, needs 2 to {MAX_COUNT.value}")
    by_row = {"slots": slots, "positions": positions, "fed_index": fed_index, "num_before": num_before}
    for name, tensor in by_row.items():
        check(name, tensor, torch.int32, rows)
    check("fed", fed, torch.int64, fed.numel())
    check("table.counts", table.counts, torch.int16, table.key.numel(), vocab_size)
    chosen = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        choose_kernel[(rows,)](
            logits,
            logits.stride(0),
            slots,
            positions,
            fed,
            fed_index,
            num_before,
            chosen,
            vocab_size,
            *(getattr(table, field.name) for field in fields(table)),
            MAX_BIAS=MAX_BIAS,
            MAX_DRAFT=MAX_DRAFT,
            BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(vocab_size))),
            num_warps=_WARPS,
            enable_fp_fusion=False,  # a product and a difference are rounded one by one, as on the host
        )
    return chosen


def reset_history(
    table: SamplingTable, slots: Tensor, tokens: Tensor, token_row: Tensor, is_prompt: Tensor
) -> None:
    """Give slots a new history: forget the old one, mark prompt tokens as seen, count answered ones.

    `slots` is int32 [N], each one once, below 0 for padding. Token m (`tokens`, int32 [M]) belongs to slot
    `slots[token_row[m]]` (int32 [M]; below 0: padding); `is_prompt` (bool or int8 [M]) says whether it was
    asked or answered. Raises `ValueError`.
    """
    num_slots, vocab_size = table.counts.shape
    is_prompt = is_prompt.view(torch.int8) if is_prompt.dtype == torch.bool else is_prompt
    check("slots", slots, torch.int32, slots.numel())
    check("tokens", tokens, torch.int32, tokens.numel())
    check("token_row", token_row, torch.int32, tokens.numel())
    check("is_prompt", is_prompt, torch.int8, tokens.numel())
    check("table.counts", table.counts, torch.int16, num_slots, vocab_size)
    check("table.seen", table.seen, torch.int8, num_slots, vocab_size)
    if slots.numel():
        grid = (slots.numel(), triton.cdiv(vocab_size, _BLOCK))
        _clear_kernel[grid](slots, table.counts, table.seen, vocab_size, BLOCK=_BLOCK)
    if tokens.numel():
        grid = (triton.cdiv(tokens.numel(), _TOKENS), 1)
        _mark_kernel[grid](
            slots,
            tokens,
            token_row,
            is_prompt,
            tokens.numel(),
            table.counts,
            table.seen,
            vocab_size,
            BLOCK=_TOKENS,
        )


@triton.jit
def _clear_kernel(slots, counts, seen, vocab_size, BLOCK: tl.constexpr):
    """counts[slot] = seen[slot] = 0, one program a block of a slot."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = (tokens < vocab_size) & (slot >= 0)
    at = slot * vocab_size + tokens
    tl.store(counts + at, tl.zeros([BLOCK], tl.int16), mask=known)
    tl.store(seen + at, tl.zeros([BLOCK], tl.int8), mask=known)


@triton.jit(do_not_specialize=["num_tokens"])
def _mark_kernel(
    slots, tokens, token_row, is_prompt, num_tokens, counts, seen, vocab_size, BLOCK: tl.constexpr
):
    """seen[slot, token] = 1 for a prompt's token, counts[slot, token] += 1 for an answered one.

    Counts are 16 bits and atomics 32: a one is added to its half of the pair. No half can overflow into
    the other before 2^16 answers of one token.
    """
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = m < num_tokens
    row = tl.load(token_row + m, mask=known, other=-1)
    slot = tl.load(slots + row, mask=row >= 0, other=-1).to(tl.int64)
    known = slot >= 0
    at = slot * vocab_size + tl.load(tokens + m, mask=known, other=0)
    asked = tl.load(is_prompt + m, mask=known, other=0) != 0
    tl.store(seen + at, tl.full([BLOCK], 1, tl.int8), mask=known & asked)
    pairs = counts.to(tl.pointer_type(tl.int32)) + (at >> 1)
    one = tl.full([BLOCK], 1, tl.int32) << ((at & 1) * 16).to(tl.int32)
    tl.atomic_add(pairs, one, mask=known & (asked == 0), sem="relaxed")
