"""Sums over rows: what a receipt, a part, a job and its report count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from typing import Any

COUNTED = (
    "status",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "steps",
    "drafted_tokens",
    "accepted_tokens",
    "gpu_seconds",
    "cost_usd",
)
"""The columns of an output row that are counted."""


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
    rows_copied: int = 0
    """Answered without any time of an engine: `dedupe` found the same request in the shard."""
    copied_tokens: int = 0
    """Completion tokens of those."""
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


def totals_of(columns: Mapping[str, Sequence[Any]]) -> Totals:
    """The totals of output rows that are laid in columns."""
    status = columns["status"]
    rows_ok = status.count("ok")
    copied = [
        tokens
        for state, seconds, tokens in zip(
            status, columns["gpu_seconds"], columns["completion_tokens"], strict=True
        )
        if state == "ok" and not seconds
    ]
    return Totals(
        rows_ok=rows_ok,
        rows_error=len(status) - rows_ok,
        prompt_tokens=sum(columns["prompt_tokens"]),
        cached_tokens=sum(columns["cached_tokens"]),
        completion_tokens=sum(columns["completion_tokens"]),
        steps=sum(columns["steps"]),
        drafted_tokens=sum(columns["drafted_tokens"]),
        accepted_tokens=sum(columns["accepted_tokens"]),
        busy_ns=sum(round(seconds * 1e9) for seconds in columns["gpu_seconds"]),
        rows_copied=len(copied),
        copied_tokens=sum(copied),
        cost_usd=sum(map(_decimal, columns["cost_usd"]), Decimal(0)),
    )


def _decimal(cost: Decimal | float) -> Decimal:
    """JSON has costs as numbers."""
    return cost if isinstance(cost, Decimal) else Decimal(str(cost))
