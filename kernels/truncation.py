"""Top-k and top-p of one row without sorting: which scores stay, found by narrowing a range of scores.

Scores here are at most zero, the best one is zero. Their bits without the sign, as an integer, are their
depth below the best: 0 for zeros of either sign, 0x7F800000 for -inf. A set of best tokens is then two
numbers: all tokens less deep than `limit`, and of those exactly that deep the ids up to `cut`. All sums
that decide are sums of integers, so that no order of summation changes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

DEEPEST = tl.constexpr(0x7F800000)
_FIRST_FLOOR = tl.constexpr(0x3C000000)
"""The first pass tells apart depths from 2^-7 to 2^9 by factors of four: where scores of models lie."""
_FIRST_SHIFT = tl.constexpr(24)
_WIDEST_SHIFT = tl.constexpr(27)
"""Eight parts of 2^27 depths cover what lies below, or above, all inner parts of the first pass."""
_COUNT_BITS = tl.constexpr(20)
"""A weight and a one are added as one integer; counts stay below 2^20, shares together below 2^41."""
MAX_COUNT = tl.constexpr((1 << 20) - 1)
_ONE_TOKEN = tl.constexpr((1 << 20) + 1)


@triton.jit
def is_kept(scores, tokens, limit, cut):
    """Whether each token belongs to the set that `limit` and `cut` describe; never for NaN."""
    depth = scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (depth < limit) | ((depth == limit) & (tokens <= cut))


@triton.jit
def sum_of_exp(row, vocab_size, limit, cut, BLOCK: tl.constexpr):
    """The softmax's denominator over the kept tokens, float32, in one order: by lane, then over lanes."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        scores = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf"))
        sums += tl.where(is_kept(scores, tokens, limit, cut), tl.exp(scores), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _sum_parts(
    row, vocab_size, total, limit, cut, low, high, origin, shift, SHARES: tl.constexpr, BLOCK: tl.constexpr
):
    """int64 [8]: weight << _COUNT_BITS | count of the kept tokens with depth in [low, high), by part.

    The parts are 2^shift wide from `origin` on; the first and the last take what lies outside of them.
    """
    part_ids = tl.arange(0, 8)
    sums = tl.zeros([8], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        known = tokens < vocab_size
        scores = tl.load(row + tokens, mask=known, other=float("-inf"))
        depth = scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        inside = known & (depth >= low) & (depth < high) & is_kept(scores, tokens, limit, cut)
        # After the first pass few blocks have any.
        if tl.max(inside.to(tl.int32), 0) > 0:
            part = tl.minimum(tl.maximum((depth - origin) >> shift, 0), 7)
            part = tl.where(inside, part, 8)
            if SHARES:
                # Times a power of two: as exact in float32 as in float64.
                share = (tl.div_rn(tl.exp(scores), total) * 1099511627776.0).to(tl.int64)
                weight = (share << _COUNT_BITS) + 1
            else:
                weight = tl.full([BLOCK], _ONE_TOKEN, tl.int64)
            sums += tl.sum(tl.where(part[None, :] == part_ids[:, None], weight[None, :], 0), 1)
    return sums


@triton.jit
def _nth_of_depth(row, vocab_size, depth, nth, BLOCK: tl.constexpr):
    """The id of the `nth` token, from 1, among those exactly this deep."""
    found = 0
    before = 0
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        scores = tl.load(row + tokens, mask=tokens < vocab_size, other=0.0)
        equal = (scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == depth
        equal = (equal & (tokens < vocab_size)).to(tl.int32)
        place = before + tl.cumsum(equal, 0)
        found += tl.sum(tl.where((equal > 0) & (place == nth), tokens, 0), 0)
        before += tl.sum(equal, 0)
    return found


@triton.jit
def fewest_best(row, vocab_size, target, total, limit, cut, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """(limit, cut) of the fewest best tokens, of those kept so far, whose weights together reach `target`.

    Weights are one each, or with SHARES the softmax's shares exp(score) / total in units of 2^-40; of
    equal scores the lower ids come first. Where all weights do not reach `target` (int64), all stay.

    Each pass over the row splits the range of depths in which the last needed token lies into eight. It
    ends early when that token is alone in its part, or all tokens of the part are needed.
    """
    part_ids = tl.arange(0, 8)
    low = 0
    high = DEEPEST + 1
    origin = _FIRST_FLOOR + 0
    shift = _FIRST_SHIFT + 0
    missing = target
    chosen = target * 0
    reached = 1
    searching = 1
    while searching > 0:
        sums = _sum_parts(row, vocab_size, total, limit, cut, low, high, origin, shift, SHARES, BLOCK)
        falls_short = (tl.cumsum(sums, 0) >> _COUNT_BITS) < missing
        part = tl.sum(falls_short.to(tl.int32), 0)
        reached = (part < 8).to(tl.int32)
        missing -= tl.sum(tl.where(part_ids < part, sums, 0), 0) >> _COUNT_BITS
        chosen = tl.sum(tl.where(part_ids == part, sums, 0), 0)
        count = chosen & MAX_COUNT
        first = origin + (part << shift)
        high = tl.where(part >= 7, high, tl.minimum(high, first + (1 << shift)))
        low = tl.where(part == 0, low, first)
        all_needed = (count == 1) | ((missing == count) & (not SHARES))
        done = all_needed | (reached == 0) | (high - low <= 1)
        searching = tl.where(done, 0, 1)
        origin = low
        shift = tl.where(high - low > (1 << shift), _WIDEST_SHIFT, tl.maximum(shift - 3, 0))
    if reached > 0:
        limit = high - 1
        cut = vocab_size
        count = chosen & MAX_COUNT
        # Where several are left they are equal, and so are their weights.
        weight = (chosen >> _COUNT_BITS) // count
        needed = (missing + weight - 1) // weight
        if (needed < count) & (high - low <= 1):
            cut = _nth_of_depth(row, vocab_size, limit, needed, BLOCK)
    return limit, cut
