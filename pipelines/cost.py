"""Busy time to money, in decimals that add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import yaml

from pipelines.errors import JobRefused

NS_PER_HOUR = 3_600 * 10**9
COST_STEP = Decimal("1e-12")
"""Costs of rows are rounded to this, half to even; sums of rows are exact after that."""
CPU = "cpu"
"""The entry for machines without an accelerator."""


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of one accelerator costs, and who says so."""

    accelerator: str
    usd_per_hour: Decimal
    date: str
    source: str

    def cost_usd(self, busy_ns: int) -> Decimal:
        """Price of so much busy time."""
        return (self.usd_per_hour * busy_ns / NS_PER_HOUR).quantize(COST_STEP)


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The prices of one file."""

    path: str
    prices: Mapping[str, Price]

    def price(self, accelerator: str) -> Price:
        """The price of an accelerator. Raises `JobRefused` where the file has none."""
        if accelerator not in self.prices:
            known = ", ".join(sorted(self.prices))
            raise JobRefused(f"{self.path} has no price for {accelerator} (it has {known}); add one")
        return self.prices[accelerator]


def load_prices(path: str) -> PriceTable:
    """The prices of a YAML file: accelerator to usd_per_hour, date, source. Raises `JobRefused`."""
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise JobRefused(f"prices {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JobRefused(f"prices {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(entries, dict) or not entries:
        raise JobRefused(f"prices {path} is not a mapping of accelerators to prices")
    return PriceTable(path, {str(name): _price(path, str(name), entry) for name, entry in entries.items()})


def _price(path: str, name: str, entry: Any) -> Price:
    if not isinstance(entry, dict) or set(entry) != {"usd_per_hour", "date", "source"}:
        raise JobRefused(f"prices {path}: {name} needs exactly usd_per_hour, date and source")
    try:
        usd_per_hour = Decimal(str(entry["usd_per_hour"]))
    except InvalidOperation as error:
        raise JobRefused(f"prices {path}: {name}.usd_per_hour is not a number") from error
    if not usd_per_hour.is_finite() or usd_per_hour < 0:
        raise JobRefused(f"prices {path}: {name}.usd_per_hour is not a price")
    day = entry["date"]
    return Price(
        name, usd_per_hour, day.isoformat() if isinstance(day, date) else str(day), str(entry["source"])
    )
