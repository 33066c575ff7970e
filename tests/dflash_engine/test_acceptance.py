"""How likely drafted tokens are accepted, against outcomes drawn from rates that are known."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from dflash_engine.acceptance import Acceptance


def draw(rng: np.random.Generator, rates: list[float]) -> int:
    """How many of len(rates) drafted tokens are accepted, token i with rates[i] if those before were."""
    return next((i for i, rate in enumerate(rates) if rng.random() >= rate), len(rates))


def steps(acceptance: Acceptance, request_id: int) -> list[float]:
    """The chance of each token, given those before it."""
    chances = acceptance.chances(request_id, acceptance.most)
    return [later / earlier for earlier, later in pairwise((1.0, *chances))]


def test_a_first_guess_is_worth_trying_and_chances_never_rise():
    chances = Acceptance(15).chances(1, 15)
    assert 0.7 < chances[0] < 0.9 and len(chances) == 15
    assert all(later <= earlier for earlier, later in pairwise(chances))
    assert Acceptance(15).chances(1, 4) == chances[:4]


@pytest.mark.parametrize("rates", [[0.1] * 4, [0.5] * 4, [0.95] * 4, [0.9, 0.6, 0.8, 0.3]])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_the_rates_of_the_text_are_found(rates, num_rows):
    rng, acceptance = np.random.default_rng(1), Acceptance(4)
    for round_ in range(2000 // num_rows):
        # Each request lives for ten rounds.
        ids = [round_ // 10 * num_rows + row for row in range(num_rows)]
        acceptance.observe_round(ids, [4] * num_rows, [draw(rng, rates) for _ in ids])
        if round_ % 10 == 9:
            for request_id in ids:
                acceptance.forget(request_id)
    reach = np.cumprod(rates)
    for i, (found, rate) in enumerate(zip(steps(acceptance, -1), rates, strict=True)):
        # A chance that is hardly ever reached cannot be known well, and need not be.
        reached = 1.0 if i == 0 else reach[i - 1]
        assert found == pytest.approx(rate, abs=0.06 if reached > 0.3 else 0.35)


def test_a_full_batch_corrects_the_first_guess_within_five_rounds():
    acceptance = Acceptance(7)
    for _ in range(5):
        acceptance.observe_round(range(256), [7] * 256, [0] * 256)
    assert acceptance.chances(-1, 1)[0] < 0.2


def test_a_request_whose_text_drafts_badly_is_told_apart_within_a_few_rounds():
    rng, acceptance = np.random.default_rng(2), Acceptance(7)
    for _ in range(6):
        taken = [draw(rng, [0.9] * 7) for _ in range(15)]
        acceptance.observe_round(range(16), [7] * 16, [*taken, 0])
    assert acceptance.chances(15, 1)[0] < 0.5 < 0.8 < acceptance.chances(0, 1)[0]


def test_chances_in_a_mixture_are_neither_over_nor_underrated():
    """What is expected of easy and hard requests together is what comes, also of deep tokens."""
    rng, acceptance = np.random.default_rng(3), Acceptance(7)
    rates = [[0.9] * 7 if row % 2 else [0.4] * 7 for row in range(64)]
    expected, given = np.zeros(7), np.zeros(7)
    for round_ in range(120):
        ids = [round_ // 30 * 64 + row for row in range(64)]
        taken = [draw(rng, rate) for rate in rates]
        if round_ >= 40:
            expected += np.sum([acceptance.chances(i, 7) for i in ids], axis=0)
            given += np.sum([[count > i for i in range(7)] for count in taken], axis=0)
        acceptance.observe_round(ids, [7] * 64, taken)
    assert expected == pytest.approx(given, rel=0.1)


def test_a_batch_is_the_same_for_a_request_wherever_it_stands():
    left, right = Acceptance(3), Acceptance(3)
    left.observe_round([1, 2, 3], [3, 2, 0], [1, 2, 0])
    right.observe_round([3, 1, 2], [0, 3, 2], [0, 1, 2])
    for request_id in (1, 2, 3, 4):
        assert left.chances(request_id, 3) == pytest.approx(right.chances(request_id, 3), rel=1e-6)


def test_tokens_behind_the_first_wrong_one_say_nothing():
    left, right = Acceptance(3), Acceptance(3)
    left.observe(1, 2, 0)
    right.observe(1, 1, 0)
    assert left.chances(1, 3) == right.chances(1, 3)


def test_another_kind_of_text_is_noticed_by_a_request():
    rng, acceptance = np.random.default_rng(4), Acceptance(7)
    for _ in range(60):
        acceptance.observe(1, 7, draw(rng, [0.9] * 7))
    for _ in range(25):
        acceptance.observe(1, 7, draw(rng, [0.2] * 7))
    assert acceptance.chances(1, 1)[0] < 0.5


def test_tokens_too_deep_to_be_reached_follow_the_last_that_are():
    rng, acceptance = np.random.default_rng(5), Acceptance(7)
    for _ in range(100):
        acceptance.observe_round(range(8), [2] * 8, [draw(rng, [0.2] * 2) for _ in range(8)])
    assert max(steps(acceptance, 1)[2:]) < 0.4


def test_a_request_given_up_as_hard_comes_back_to_the_average_in_some_hundred_rounds():
    acceptance = Acceptance(7)
    for _ in range(12):
        acceptance.observe_round([1, 2, 3], [7, 7, 7], [0, 6, 6])
    hard, average = acceptance.chances(1, 1)[0], acceptance.chances(99, 1)[0]
    for round_ in range(600):
        acceptance.observe_round([1, 2, 3], [0, 7, 7], [0, 6, 6])
        if round_ == 20:
            assert acceptance.chances(1, 1)[0] < (hard + average) / 2
    assert acceptance.chances(1, 1)[0] > 0.6 * average


def test_a_forgotten_request_is_as_good_as_new():
    acceptance = Acceptance(7)
    for _ in range(5):
        acceptance.observe(1, 7, 0)
    assert acceptance.chances(1, 1)[0] < acceptance.chances(2, 1)[0]
    acceptance.forget(1)
    acceptance.forget(1)
    assert acceptance.chances(1, 7) == acceptance.chances(2, 7)


@pytest.mark.parametrize("accepted", [0, 15])
def test_what_never_varies_stays_between_zero_and_one(accepted):
    acceptance = Acceptance(15)
    for _ in range(2000):
        acceptance.observe_round(range(4), [15] * 4, [accepted] * 4)
    chances = acceptance.chances(0, 15)
    assert all(0 <= chance < 1 and math.isfinite(chance) for chance in chances)
    assert chances[14] > 0.8 if accepted else chances[0] < 0.05


def test_rounds_without_any_draft_leave_the_estimates_but_weaken_them():
    rested, busy = Acceptance(7), Acceptance(7)
    for acceptance in (rested, busy):
        for _ in range(50):
            acceptance.observe_round(range(8), [7] * 8, [1] * 8)
    before = rested.chances(-1, 7)
    for _ in range(300):
        rested.observe_round(range(8), [0] * 8, [0] * 8)
    assert rested.chances(-1, 7) == before
    for acceptance in (rested, busy):
        acceptance.observe_round(range(100, 108), [7] * 8, [7] * 8)
    assert rested.chances(-1, 1) > busy.chances(-1, 1)
