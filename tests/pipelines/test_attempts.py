"""Rows that kill the engine are found in few deaths, and no other row is blamed."""

from __future__ import annotations

import random

import pytest

from pipelines.attempts import GROUPS, MAX_DEATHS, Attempts, Rows, attempts_from_bytes

CRASHES = 2


def search(rows: Rows, poison: set[int]) -> tuple[Attempts, set[int]]:
    """Play an engine that dies of `poison`; what is known in the end, and the rows that were answered."""
    attempts = Attempts().after_death(None, "in company")
    while True:
        answered: set[int] = set()
        for group in attempts.groups(rows, CRASHES):
            if poison.intersection(group):
                attempts = attempts_from_bytes(attempts.after_death(group, "died").as_bytes())
                break
            answered.update(group)
        else:
            return attempts, answered


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 256, 1000])
def test_one_row_is_found_wherever_it_stands(size: int):
    rows = tuple(range(size))
    for row in {0, size // 2, size - 1}:
        attempts, answered = search(rows, {row})
        assert attempts.given_up(rows, CRASHES) == (row,)
        assert answered == set(rows) - {row}
        # The whole part, then two to four ever smaller sets of suspects, then the row once more.
        assert attempts.deaths <= 1 + (1 if size <= 1 else 2 if size <= GROUPS else 4) + 1


def test_several_rows_are_found_one_after_the_other():
    generator = random.Random(3)
    for _ in range(50):
        rows = tuple(generator.sample(range(1000), 256))
        poison = set(generator.sample(rows, 4))
        attempts, answered = search(rows, poison)
        assert set(attempts.given_up(rows, CRASHES)) == poison
        assert answered == set(rows) - poison


def test_a_part_of_nothing_but_poison_comes_to_an_end():
    rows = tuple(range(256))
    attempts, answered = search(rows, set(rows))
    assert attempts.deaths == MAX_DEATHS
    assert attempts.given_up(rows, CRASHES) == rows
    assert not answered


def test_deaths_in_company_and_single_deaths_of_a_row_blame_nobody():
    rows = tuple(range(20))
    attempts = Attempts()
    for _ in range(5):
        attempts = attempts.after_death(None, "a node went away")
    for row in range(5):
        attempts = attempts.after_death((row,), "a node went away")
    assert attempts.given_up(rows, CRASHES) == ()
    assert sorted(row for group in attempts.groups(rows, CRASHES) for row in group) == list(rows)


def test_a_row_is_done_alone_again_before_it_is_blamed():
    attempts = Attempts().after_death((3,), "died")
    assert attempts.groups(range(5), CRASHES) == [(3,), (0, 1, 2, 4)]
    assert attempts.after_death((3,), "died").groups(range(5), CRASHES) == [(0, 1, 2, 4)]
