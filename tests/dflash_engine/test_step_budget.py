"""How a scarce budget is shared."""

from __future__ import annotations

from dflash_engine.step_budget import share_evenly


def test_shares_are_even_and_never_more_than_wanted() -> None:
    assert share_evenly([7, 7, 7], 8) == [3, 3, 2]
    assert share_evenly([1, 7, 7], 8) == [1, 4, 3]
    assert share_evenly([2, 3], 9) == [2, 3]
    assert share_evenly([2, 3], 0) == [0, 0]
    assert share_evenly([], 4) == []
