"""From a sample of rows to what a job is likely to take."""

from __future__ import annotations

import io
import json
import random
from decimal import Decimal
from statistics import fmean

import pytest

from pipelines.cost import Price
from pipelines.estimate import Estimate, Measured, expected_sum, print_estimate

PRICE = Price("H200", Decimal("3.60"), "2026-11-01", "a list")


def estimate(**changes: object) -> Estimate:
    values: dict[str, object] = {
        "output": "out", "model": "m", "parts": 3, "rows_ok": 1000, "errors": {"invalid_json": 2},
        "prompt_tokens": 50_000, "elapsed_s": 1.5, "price": PRICE, "engines": 2,
        "sample": [Measured(10, 2_000_000_000), Measured(30, 4_000_000_000)],
    }  # fmt: skip
    return Estimate(**(values | changes))


def test_about_19_of_20_ranges_hold_the_true_sum() -> None:
    noise = random.Random(3)
    rows = [noise.paretovariate(2.5) for _ in range(2000)]
    hits = 0
    for _ in range(400):
        found = expected_sum(noise.sample(rows, 64), len(rows))
        hits += found.low <= sum(rows) <= found.high
    assert 0.85 < hits / 400 <= 1


def test_a_sample_of_all_rows_leaves_no_doubt() -> None:
    found = expected_sum([1.0, 2.0, 6.0], 3)
    assert (found.low, found.mean, found.high) == (9.0, 9.0, 9.0)


def test_one_row_says_nothing_of_the_range() -> None:
    found = expected_sum([5.0], 10)
    assert (found.low, found.mean, found.high) == (0.0, 50.0, 100.0)


def test_tokens_hours_and_money_follow_from_the_sample() -> None:
    line = estimate().as_json()
    assert line["completion_tokens"][1] == 20 * 1000
    assert line["gpu_seconds"][1] == 3 * 1000
    assert line["hours"][1] == pytest.approx(3000 / 3600 / 2)
    assert line["cost_usd"][1] == pytest.approx(3000 * 3.60 / 3600)
    for name in ("completion_tokens", "gpu_seconds", "hours", "cost_usd"):
        low, mean, high = line[name]
        assert 0 <= low < mean < high and mean == pytest.approx(fmean((low, high)))


def test_rows_at_which_the_sample_failed_are_expected_to_fail_in_the_job_too() -> None:
    line = estimate(sample_errors={"internal_error": 2}).as_json()
    assert line["completion_tokens"][1] == 20 * 500


def test_without_a_sample_nothing_is_said_of_money() -> None:
    line = estimate(sample=[], price=None).as_json()
    assert line["prompt_tokens"] == 50_000 and line["errors"] == {"invalid_json": 2}
    assert "cost_usd" not in line and "hours" not in line


def test_nothing_that_can_be_answered_is_a_failure_and_nothing_at_all_is_not() -> None:
    assert estimate(rows_ok=0, sample=[]).exit_code == 1
    assert estimate(rows_ok=0, sample=[], errors={}).exit_code == 0
    assert estimate().exit_code == 0


def test_the_last_line_printed_is_json_and_the_table_names_each_reason() -> None:
    file = io.StringIO()
    print_estimate(estimate(errors={"invalid_json": 2, "line_too_long": 1}), file)
    *table, last = file.getvalue().splitlines()
    assert json.loads(last)["rows_error"] == 3
    text = "\n".join(table)
    assert "invalid_json" in text and "line_too_long" in text and "2 x H200" in text
