"""Shares of a step's busy time, row by row, in integer nanoseconds.

Formula version 1: a row weighs 4 for each query token that the target computes (fed or verified) and
1 more for each token that the draft proposed. A drafted token costs about a quarter of a verified one:
the draft has 4 or 5 layers to the target's 28 to 36, but its candidates go through the same head.
Neither the length of the context nor padding counts, so the figure does not depend on who else is in
the step. Records carry the version, so that a later formula can be told from this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_engine.plan import RowPlan

FORMULA_VERSION = 1
_TARGET_TOKEN = 4
_DRAFTED_TOKEN = 1


def row_weight(row: RowPlan) -> int:
    """Work that a row causes in its step, in quarters of a target token; at least 4."""
    return _TARGET_TOKEN * (row.num_tokens + row.num_draft) + _DRAFTED_TOKEN * row.num_draft


def share_ns(total_ns: int, weights: Sequence[int]) -> list[int]:
    """Splits `total_ns` in proportion to the weights; the shares add up to it exactly.

    Largest-remainder rule: each gets its quotient rounded down, and the nanoseconds left over go one
    each to the largest remainders, the lower index first among equals.
    """
    whole = sum(weights)
    assert total_ns >= 0 and whole > 0 and min(weights) >= 0, (total_ns, weights)
    parts = [divmod(total_ns * weight, whole) for weight in weights]
    shares = [quotient for quotient, _ in parts]
    owed = [-remainder for _, remainder in parts]
    for index in sorted(range(len(parts)), key=owed.__getitem__)[: total_ns - sum(shares)]:
        shares[index] += 1
    return shares
