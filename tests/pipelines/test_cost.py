"""Money in decimals, from a file that says where its prices come from."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from pipelines.cost import Price, load_prices
from pipelines.errors import JobRefused

ROOT = Path(__file__).resolve().parents[2]


def price(usd_per_hour: str) -> Price:
    return Price("x", Decimal(usd_per_hour), "2026-01-01", "test")


@pytest.mark.parametrize(
    ("usd_per_hour", "busy_ns", "cost"),
    [
        ("3.6", 10**9, "0.001000000000"),
        ("1", 3_600 * 10**9, "1.000000000000"),
        ("1", 1, "0.000000000000"),
        ("7.2", 1, "0.000000000002"),
        ("1.8", 1, "0.000000000000"),
        ("5.4", 1, "0.000000000002"),
        ("0.1", 0, "0.000000000000"),
    ],
)
def test_cost_of_busy_time(usd_per_hour: str, busy_ns: int, cost: str):
    assert f"{price(usd_per_hour).cost_usd(busy_ns):f}" == cost


def test_the_prices_of_the_project_name_date_and_source():
    table = load_prices(str(ROOT / "configs" / "prices.yaml"))
    assert {"cpu", "H100", "H200"} <= set(table.prices)
    assert all(entry.usd_per_hour > 0 and entry.date and entry.source for entry in table.prices.values())


def test_a_missing_price_is_named(tmp_path: Path):
    (tmp_path / "p.yaml").write_text("cpu: {usd_per_hour: 1, date: 2026-01-01, source: test}")
    with pytest.raises(JobRefused, match=r"p\.yaml has no price for B200 \(it has cpu\)"):
        load_prices(str(tmp_path / "p.yaml")).price("B200")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "is not a mapping"),
        ("a: [", "is not YAML"),
        ("a: 1", "a needs exactly usd_per_hour, date and source"),
        ("a: {usd_per_hour: 1, date: x}", "a needs exactly"),
        ("a: {usd_per_hour: cheap, date: x, source: y}", "a.usd_per_hour is not a number"),
        ("a: {usd_per_hour: -1, date: x, source: y}", "a.usd_per_hour is not a price"),
        ("a: {usd_per_hour: .nan, date: x, source: y}", "a.usd_per_hour is not a price"),
    ],
)
def test_a_bad_price_file_is_named(tmp_path: Path, text: str, reason: str):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(JobRefused, match=reason):
        load_prices(str(tmp_path / "p.yaml"))


def test_a_price_file_that_is_not_there_is_named():
    with pytest.raises(JobRefused, match=r"prices nowhere\.yaml cannot be read"):
        load_prices("nowhere.yaml")
