"""The end of a job: a table for people, then one JSON line for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TextIO

import orjson
from rich.console import Console
from rich.table import Table

from pipelines.totals import Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What came of a job, over all its runs but for `elapsed_s`, which is of the run that ended it."""

    output: str
    model: str
    totals: Totals
    elapsed_s: float
    parts: int = 0
    duplicate_custom_ids: int = 0

    @property
    def exit_code(self) -> int:
        """1 where there were rows and every one failed."""
        return 1 if self.totals.rows and not self.totals.rows_ok else 0

    def as_json(self) -> dict[str, Any]:
        """Values of the last line; seconds and US dollars as numbers."""
        totals = self.totals
        return {
            "rows_ok": totals.rows_ok,
            "rows_error": totals.rows_error,
            "rows_copied": totals.rows_copied,
            "copied_tokens": totals.copied_tokens,
            "duplicate_custom_ids": self.duplicate_custom_ids,
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "completion_tokens": totals.completion_tokens,
            "steps": totals.steps,
            "drafted_tokens": totals.drafted_tokens,
            "accepted_tokens": totals.accepted_tokens,
            "acceptance_length": round(totals.acceptance_length, 4),
            "gpu_seconds": totals.gpu_seconds,
            "cost_usd": float(totals.cost_usd),
            "elapsed_s": round(self.elapsed_s, 3),
            "parts": self.parts,
            "model": self.model,
            "output": self.output,
        }


def print_report(summary: Summary, file: TextIO) -> None:
    """The table and, last of all, the JSON line."""
    totals = summary.totals
    table = Table("", "", show_header=False)
    table.columns[1].overflow = "fold"
    table.add_row("rows answered", f"{totals.rows_ok:,}")
    table.add_row("rows with an error", f"{totals.rows_error:,}")
    table.add_row("repeated custom_ids", f"{summary.duplicate_custom_ids:,}")
    if totals.rows_copied:
        copied = f"{totals.rows_copied:,} with {totals.copied_tokens:,} tokens, at no cost"
        table.add_row("copied answers", copied)
    table.add_row("prompt tokens", f"{totals.prompt_tokens:,} ({totals.cached_tokens:,} from cache)")
    table.add_row("completion tokens", f"{totals.completion_tokens:,}")
    table.add_row("acceptance length", f"{totals.acceptance_length:.2f} tokens per verify step")
    table.add_row("engine busy", f"{totals.gpu_seconds:,.2f} s")
    table.add_row("cost of it", f"${totals.cost_usd:,.6f}")
    table.add_row("elapsed", f"{summary.elapsed_s:,.1f} s")
    table.add_row("model", summary.model)
    table.add_row("output", summary.output)
    Console(file=file).print(table)
    print(orjson.dumps(summary.as_json()).decode(), file=file, flush=True)
