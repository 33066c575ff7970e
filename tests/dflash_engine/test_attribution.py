"""Busy time shared out to the last nanosecond."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from dflash_engine.attribution import row_weight, share_ns
from dflash_engine.plan import RowPlan
from dflash_engine.request import SamplingParams

WEIGHTS = st.lists(st.integers(0, 10_000), min_size=1, max_size=40).filter(any)


def row(num_tokens: int, num_draft: int) -> RowPlan:
    return RowPlan(
        seq_id=1,
        start=0,
        tokens=(5,) * num_tokens,
        num_draft=num_draft,
        sample=True,
        block_table=(0,),
        sampling=SamplingParams(),
        seed=0,
        prompt=(5,),
        output=(),
    )


@given(st.integers(0, 10**15), WEIGHTS)
def test_shares_add_up_and_are_off_by_less_than_one(total_ns: int, weights: list[int]) -> None:
    shares = share_ns(total_ns, weights)
    assert sum(shares) == total_ns
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - Fraction(total_ns * weight, sum(weights))) < 1


@given(st.integers(0, 10**12), WEIGHTS)
def test_no_smaller_remainder_is_rounded_up_while_a_larger_one_is_not(
    total_ns: int, weights: list[int]
) -> None:
    whole = sum(weights)
    shares = share_ns(total_ns, weights)
    exact = [Fraction(total_ns * weight, whole) for weight in weights]
    order = [(-(x - int(x)), index) for index, x in enumerate(exact)]
    up = [key for key, share, x in zip(order, shares, exact, strict=True) if share > int(x)]
    down = [key for key, share, x in zip(order, shares, exact, strict=True) if share == int(x)]
    assert not up or not down or max(up) < min(down)


def test_equal_rows_get_the_odd_nanoseconds_by_index() -> None:
    assert share_ns(11, [1, 1, 1]) == [4, 4, 3]
    assert share_ns(2, [1, 1, 1]) == [1, 1, 0]


def test_the_largest_remainder_gets_the_nanosecond() -> None:
    assert share_ns(10, [1, 2, 4]) == [1, 3, 6]  # 1.43, 2.86, 5.71


def test_a_row_without_weight_pays_nothing() -> None:
    assert share_ns(7, [0, 3, 0]) == [0, 7, 0]


def test_prefill_weighs_by_its_tokens_alone() -> None:
    assert row_weight(row(100, 0)) == 100 * row_weight(row(1, 0))


def test_a_drafted_token_weighs_a_quarter_more_than_a_fed_one() -> None:
    anchor = row_weight(row(1, 0))
    for num_draft in (1, 7, 15):
        assert Fraction(row_weight(row(1, num_draft)) - anchor, num_draft) == Fraction(5, 4) * anchor
