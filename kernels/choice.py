"""The choice of one row's token on the GPU, stage by stage; `kernels.sampling` says what is passed in.

A row is one program's work from beginning to end, in blocks of fixed size, so that its result depends on
nothing else. Stages that a request does not use cost it nothing. Where a stage changes scores it does so
in place; a barrier separates what threads write from what others then read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.noise import gumbel, gumbel_ceiling, position_key
from kernels.truncation import DEEPEST, fewest_best, is_kept, sum_of_exp


@triton.jit
def choose_kernel(
    logits,
    logits_stride,
    slots,
    positions,
    fed,
    fed_index,
    num_before,
    chosen,
    vocab_size,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    repetitions,
    presences,
    frequencies,
    keys,
    num_bias,
    bias_tokens,
    bias_values,
    counts,
    seen,
    MAX_BIAS: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """chosen[w] = argmax over t of score[t] + gumbel[t] (greedy: of score[t]); one program a row."""
    w = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + w).to(tl.int64)
    token = 0
    if slot >= 0:
        row = logits + w * logits_stride
        biases = tl.load(num_bias + slot)
        if biases > 0:
            at = slot * MAX_BIAS
            _add_bias(row, vocab_size, bias_tokens + at, bias_values + at, biases, MAX_BIAS)
        repetition = tl.load(repetitions + slot)
        presence = tl.load(presences + slot)
        frequency = tl.load(frequencies + slot)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            drafted = fed + tl.load(fed_index + w).to(tl.int64)
            num_drafted = tl.load(num_before + w)
            history = slot * vocab_size
            _penalise_row(
                row,
                vocab_size,
                drafted,
                num_drafted,
                counts + history,
                seen + history,
                repetition,
                presence,
                frequency,
                MAX_DRAFT,
                BLOCK,
            )
        best, token = _best(row, vocab_size, BLOCK)
        temperature = tl.load(temperatures + slot)
        if temperature > 0:
            top_k = tl.load(top_ks + slot)
            top_p = tl.load(top_ps + slot)
            min_p = tl.load(min_ps + slot)
            key = position_key(tl.load(keys + slot), tl.load(positions + w))
            limit, cut, scaled = _truncate(row, vocab_size, best, temperature, min_p, top_k, top_p, BLOCK)
            best = tl.where(scaled, 0.0, best)
            temperature = tl.where(scaled, 1.0, temperature)
            token = _best_with_noise(row, vocab_size, token, best, temperature, key, limit, cut, BLOCK)
    tl.store(chosen + w, token)


@triton.jit
def _add_bias(row, vocab_size, tokens, values, number, MAX_BIAS: tl.constexpr):
    i = tl.arange(0, MAX_BIAS)
    token = tl.load(tokens + i, mask=i < number, other=0)
    valid = (i < number) & (token >= 0) & (token < vocab_size)
    scores = tl.load(row + token, mask=valid, other=0.0) + tl.load(values + i, mask=valid, other=0.0)
    tl.store(row + token, scores, mask=valid)
    tl.debug_barrier()


@triton.jit
def _penalised(scores, counts, seen, repetition, presence, frequency):
    """Repetition as in CTRL (arXiv 1909.05858), then frequency and presence as in OpenAI's API."""
    damped = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
    scores = tl.where(seen, damped, scores)
    return scores - frequency * counts.to(tl.float32) - presence * (counts > 0).to(tl.float32)


@triton.jit
def _penalise_row(
    row,
    vocab_size,
    drafted,
    num_drafted,
    counts,
    seen,
    repetition,
    presence,
    frequency,
    MAX_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Penalise all of the row by what is counted, and the drafted tokens by what they add to it."""
    i = tl.arange(0, MAX_DRAFT)
    valid = i < num_drafted
    extra_tokens = tl.load(drafted - i, mask=valid, other=-1)
    extra = tl.sum((extra_tokens[:, None] == extra_tokens[None, :]).to(tl.int32), 1)
    extra += tl.load(counts + extra_tokens, mask=valid, other=0).to(tl.int32)
    extra_scores = tl.load(row + extra_tokens, mask=valid, other=0.0)
    extra_scores = _penalised(extra_scores, extra, extra > 0, repetition, presence, frequency)
    tl.debug_barrier()
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        known = tokens < vocab_size
        count = tl.load(counts + tokens, mask=known, other=0).to(tl.int32)
        was_seen = (tl.load(seen + tokens, mask=known, other=0) != 0) | (count > 0)
        scores = tl.load(row + tokens, mask=known, other=0.0)
        scores = _penalised(scores, count, was_seen, repetition, presence, frequency)
        tl.store(row + tokens, scores, mask=known)
    tl.debug_barrier()
    tl.store(row + extra_tokens, extra_scores, mask=valid)
    tl.debug_barrier()


@triton.jit
def _best(row, vocab_size, BLOCK: tl.constexpr):
    """The best score and its token, of equals the first; NaN is never the best."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        scores = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf"))
        better = scores > best
        best = tl.where(better, scores, best)
        best_token = tl.where(better, tokens, best_token)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_token, vocab_size), 0)


@triton.jit
def _truncate(row, vocab_size, best, temperature, min_p, top_k, top_p, BLOCK: tl.constexpr):
    """(limit, cut, scaled): the set that stays, and whether the row now holds scores below a best of zero.

    min-p compares exp(score) with min_p: both sides of the rule on probabilities times their denominator.
    """
    limit = DEEPEST + 0
    cut = vocab_size
    by_rank = (top_k > 0) & (top_k < vocab_size)
    by_share = top_p < 1099511627776
    scaled = by_rank | by_share | (min_p > 0)
    if scaled:
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            known = tokens < vocab_size
            scores = tl.load(row + tokens, mask=known, other=float("-inf"))
            scores = tl.div_rn(scores - best, temperature)
            scores = tl.where(tl.exp(scores) >= min_p, scores, float("-inf"))
            tl.store(row + tokens, scores, mask=known)
        tl.debug_barrier()
        if by_rank:
            limit, cut = fewest_best(row, vocab_size, top_k.to(tl.int64), 1.0, limit, cut, False, BLOCK)
        if by_share:
            total = sum_of_exp(row, vocab_size, limit, cut, BLOCK)
            limit, cut = fewest_best(row, vocab_size, top_p, total, limit, cut, True, BLOCK)
    return limit, cut, scaled


@triton.jit
def _best_with_noise(row, vocab_size, token, best, temperature, key, limit, cut, BLOCK: tl.constexpr):
    """The kept token whose (score - best) / temperature + noise is best, beginning with the best score's.

    A block in which no token can win by the noise's ceiling is left without the exact noise.
    """
    top = gumbel(key, token)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        known = tokens < vocab_size
        scores = tl.div_rn(tl.load(row + tokens, mask=known, other=float("-inf")) - best, temperature)
        scores = tl.where(is_kept(scores, tokens, limit, cut), scores, float("-inf"))
        if tl.max(scores + gumbel_ceiling(key, tokens), 0) >= top:
            scores += gumbel(key, tokens)
            block_top = tl.max(scores, 0)
            block_token = tl.min(tl.where(scores == block_top, tokens, vocab_size), 0)
            better = (block_top > top) | ((block_top == top) & (block_token < token))
            top = tl.where(better, block_top, top)
            token = tl.where(better, block_token, token)
    return token
