"""Sums over rows: what a receipt, a part, a job and its report count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from typing import Any


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts and costs of some rows; they add up exactly."""

    rows_ok: int = 0
    rows_error: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    busy_ns: int = 0
    cost_usd: Decimal = Decimal(0)

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    @property
    def rows(self) -> int:
        return self.rows_ok + self.rows_error

    @property
    def gpu_seconds(self) -> float:
        return self.busy_ns / 1e9

    @property
    def acceptance_length(self) -> float:
        """Tokens of the answers per verify step, the target's own included; 0 without steps.

        Pooled over the rows; each answer's first token is prefill's and counts for no step.
        """
        return (self.completion_tokens - self.rows_ok) / self.steps if self.steps else 0.0

    def as_json(self) -> dict[str, Any]:
        """Values for JSON; the cost as text, so that no digit is lost."""
        return {**asdict(self), "cost_usd": str(self.cost_usd)}


def totals_from_json(values: Mapping[str, Any]) -> Totals:
    """The totals of `as_json`."""
    return Totals(**{**values, "cost_usd": Decimal(values["cost_usd"])})


def totals_of(rows: Iterable[Mapping[str, Any]]) -> Totals:
    """The totals of output rows."""
    total = Totals()
    for row in rows:
        total += Totals(
            rows_ok=row["status"] == "ok",
            rows_error=row["status"] != "ok",
            prompt_tokens=row["prompt_tokens"],
            cached_tokens=row["cached_tokens"],
            completion_tokens=row["completion_tokens"],
            steps=row["steps"],
            drafted_tokens=row["drafted_tokens"],
            accepted_tokens=row["accepted_tokens"],
            busy_ns=round(row["gpu_seconds"] * 1e9),
            cost_usd=Decimal(str(row["cost_usd"])),
        )
    return total
