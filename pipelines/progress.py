"""How a job gets on, shown to whoever started it: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn
from rich.text import Text

from pipelines.receipt import Receipt
from pipelines.totals import Totals

LOG_INTERVAL_S = 5.0


class JobProgress:
    """Rows, tokens/s, acceptance length, money so far and time left, from the stream of receipts.

    `total_bytes` is the size of the input that this run has to do; time left is told by its share done.
    """

    def __init__(self, total_bytes: int, file: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_bytes = max(1, total_bytes)
        self._done_bytes = 0
        self._totals = Totals()
        self._clock = clock
        self._started = clock()
        self._logged = self._started - LOG_INTERVAL_S
        self._file = file
        console = Console(file=file)
        self._bar = Progress(BarColumn(bar_width=None), TaskProgressColumn(), console=console, expand=True)
        self._task = self._bar.add_task("", total=self._total_bytes)
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=lambda: Group(self._bar, Text(self.line())))

    def __enter__(self) -> JobProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            # Ranges in which no line starts give no receipt.
            self._done_bytes = self._total_bytes
            self._bar.update(self._task, completed=self._done_bytes)
        if self._live is not None:
            self._live.stop()
        elif kind is None:
            self._log()

    def add(self, receipt: Receipt) -> None:
        """Count a shard that is written."""
        self._totals += receipt.totals
        self._done_bytes += receipt.input_bytes
        self._bar.update(self._task, completed=self._done_bytes)
        if self._live is None and self._clock() - self._logged >= LOG_INTERVAL_S:
            self._log()

    def line(self) -> str:
        """The state in one line."""
        totals = self._totals
        elapsed_s = max(1e-9, self._clock() - self._started)
        errors = f" ({totals.rows_error:,} errors)" if totals.rows_error else ""
        return (
            f"{totals.rows:,} rows{errors} · {totals.completion_tokens / elapsed_s:,.1f} tokens/s"
            f" · acceptance {totals.acceptance_length:.2f} · ${totals.cost_usd:.6f} · {self._left(elapsed_s)}"
        )

    def _left(self, elapsed_s: float) -> str:
        share = min(1.0, self._done_bytes / self._total_bytes)
        if not share:
            return "time left unknown"
        minutes, seconds = divmod(round(elapsed_s * (1 - share) / share), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours:d}:{minutes:02d}:{seconds:02d} left" if hours else f"{minutes:02d}:{seconds:02d} left"

    def _log(self) -> None:
        self._logged = self._clock()
        print(self.line(), file=self._file, flush=True)
