"""What a job is likely to take, from a sample of its rows: means with a range, in tokens, hours and money."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from statistics import fmean, stdev
from typing import Any, TextIO

import orjson
from rich.console import Console
from rich.table import Table

from pipelines.cost import Price

SPREAD = 2.0
"""Standard errors to each side: about 19 of 20 such ranges hold the true mean."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the sample, answered."""

    completion_tokens: int
    busy_ns: int


@dataclass(frozen=True, slots=True)
class Range:
    """Of a sum over all rows."""

    low: float
    mean: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.mean * factor, self.high * factor)

    def as_json(self) -> list[float]:
        return [round(value, 12) for value in (self.low, self.mean, self.high)]


def expected_sum(values: Sequence[float], num_rows: int) -> Range:
    """The sum over `num_rows` rows of which these values are a random sample.

    The mean times the rows, SPREAD standard errors to each side; a sample of all rows leaves no doubt. One
    value says nothing of the range: from 0 to twice as much.
    """
    mean = fmean(values)
    if len(values) >= num_rows:
        return Range(*(mean * num_rows,) * 3)
    if len(values) < 2:
        return Range(0.0, mean, 2 * mean).times(num_rows)
    unseen = math.sqrt((num_rows - len(values)) / (num_rows - 1))
    error = SPREAD * stdev(values) / math.sqrt(len(values)) * unseen
    return Range(max(mean - error, 0.0), mean, mean + error).times(num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a dry run found."""

    output: str
    model: str
    parts: int
    rows_ok: int
    errors: Mapping[str, int]
    """Rows that cannot be answered, by reason."""
    prompt_tokens: int
    elapsed_s: float
    sample: Sequence[Measured] = ()
    sample_errors: Mapping[str, int] = field(default_factory=dict)
    """Rows of the sample that the engine refused or failed at, by reason."""
    price: Price | None = None
    """Where there is a sample."""
    engines: int = 1

    @property
    def rows_error(self) -> int:
        return sum(self.errors.values())

    @property
    def exit_code(self) -> int:
        """1 where there were rows and none can be answered."""
        return 1 if self.rows_error and not self.rows_ok else 0

    @property
    def completion_tokens(self) -> Range | None:
        return self._sum([row.completion_tokens for row in self.sample])

    @property
    def gpu_seconds(self) -> Range | None:
        return self._sum([row.busy_ns / 1e9 for row in self.sample])

    def _sum(self, values: Sequence[float]) -> Range | None:
        if not values:
            return None
        answered = len(values) / (len(values) + sum(self.sample_errors.values()))
        return expected_sum(values, max(round(self.rows_ok * answered), 1))

    def as_json(self) -> dict[str, Any]:
        """Values of the last line; each range as [low, mean, high]."""
        line: dict[str, Any] = {
            "dry_run": True,
            "rows_ok": self.rows_ok,
            "rows_error": self.rows_error,
            "errors": dict(self.errors),
            "prompt_tokens": self.prompt_tokens,
            "sample_rows": len(self.sample),
            "sample_errors": dict(self.sample_errors),
        }
        tokens, seconds = self.completion_tokens, self.gpu_seconds
        if tokens is not None and seconds is not None and self.price is not None:
            usd = float(self.price.usd_per_hour / Decimal(3600))
            line |= {
                "completion_tokens": tokens.as_json(),
                "gpu_seconds": seconds.as_json(),
                "hours": seconds.times(1 / 3600 / self.engines).as_json(),
                "cost_usd": seconds.times(usd).as_json(),
                "accelerator": self.price.accelerator,
                "engines": self.engines,
            }
        return line | {
            "elapsed_s": round(self.elapsed_s, 3),
            "parts": self.parts,
            "model": self.model,
            "output": self.output,
        }


def print_estimate(estimate: Estimate, file: TextIO) -> None:
    """A table for people and, last of all, the JSON line."""
    table = Table("", "", title="Dry run: nothing was written", show_header=False)
    table.columns[1].overflow = "fold"
    table.add_row("rows that can be answered", f"{estimate.rows_ok:,} in {estimate.parts:,} shards")
    for reason, count in sorted(estimate.errors.items(), key=lambda entry: -entry[1]):
        table.add_row(f"bad rows: {reason}", f"{count:,}")
    table.add_row("prompt tokens", f"{estimate.prompt_tokens:,}")
    line = estimate.as_json()
    if "hours" in line:
        engines, accelerator = estimate.engines, line["accelerator"]
        table.add_row("sample", f"{len(estimate.sample):,} rows answered, at their own batch width")
        table.add_row("completion tokens", _shown(line["completion_tokens"], "{:,.0f}"))
        table.add_row("engine busy", _shown(line["gpu_seconds"], "{:,.1f} s"))
        table.add_row(f"hours on {engines:,} x {accelerator}", _shown(line["hours"], "{:,.3f}"))
        table.add_row("cost", _shown(line["cost_usd"], "${:,.4f}"))
    for reason, count in estimate.sample_errors.items():
        table.add_row(f"failed in the sample: {reason}", f"{count:,}")
    table.add_row("model", estimate.model)
    table.add_row("output", estimate.output)
    Console(file=file).print(table)
    print(orjson.dumps(line).decode(), file=file, flush=True)


def _shown(values: Sequence[float], form: str) -> str:
    low, mean, high = (form.format(value) for value in values)
    return f"{mean} ({low} to {high})"
