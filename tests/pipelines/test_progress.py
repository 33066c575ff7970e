"""What the person who started a job sees."""

from __future__ import annotations

import io
from decimal import Decimal

import orjson
import pytest

from pipelines.progress import LOG_INTERVAL_S, JobProgress
from pipelines.receipt import Receipt, receipt_from_record
from pipelines.report import Summary, print_report
from pipelines.totals import Totals

TOTALS = Totals(
    rows_ok=8, rows_error=2, prompt_tokens=50, completion_tokens=100, steps=40, drafted_tokens=280,
    accepted_tokens=52, busy_ns=1_500_000_000, cost_usd=Decimal("0.000123456789"),
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def receipt(share: int = 250) -> Receipt:
    return Receipt(shard_id="s", input_bytes=share, totals=TOTALS)


def test_a_receipt_survives_the_trip_from_an_actor():
    for sent in (receipt(), Receipt(shard_id="s", failure="no model", exit_code=2)):
        assert receipt_from_record(sent.as_record()) == sent


def test_log_lines_tell_rows_speed_acceptance_money_and_time_left():
    clock, log = Clock(), io.StringIO()
    with JobProgress(1000, log, clock) as progress:
        clock.now += 20
        progress.add(receipt())
        assert log.getvalue() == (
            "10 rows (2 errors) · 5.0 tokens/s · acceptance 2.30 · $0.000123 · 01:00 left\n"
        )


def test_log_lines_keep_their_distance_and_the_last_state_is_always_told():
    clock, log = Clock(), io.StringIO()
    with JobProgress(1000, log, clock) as progress:
        for _ in range(4):
            clock.now += LOG_INTERVAL_S * 0.6
            progress.add(receipt())
    lines = log.getvalue().splitlines()
    assert [line.split(" (")[0] for line in lines] == ["10 rows", "30 rows", "40 rows"]
    assert lines[-1].endswith("00:00 left")


def test_a_terminal_gets_a_bar():
    terminal = Terminal()
    with JobProgress(1000, terminal) as progress:
        progress.add(receipt())
    assert "━" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert "10 rows (2 errors)" in terminal.getvalue()


def test_the_last_line_of_a_report_is_json_with_the_documented_keys():
    summary = Summary(output="/out", model="m", totals=TOTALS, elapsed_s=2.0, parts=1, duplicate_custom_ids=3)
    out = io.StringIO()
    print_report(summary, out)
    last = orjson.loads(out.getvalue().splitlines()[-1])
    documented = "rows_ok rows_error prompt_tokens completion_tokens acceptance_length"
    documented += " gpu_seconds cost_usd elapsed_s output"
    assert set(documented.split()) <= last.keys()
    assert (last["rows_ok"], last["acceptance_length"], last["gpu_seconds"]) == (8, 2.3, 1.5)
    assert (last["cost_usd"], last["duplicate_custom_ids"]) == (0.000123456789, 3)


@pytest.mark.parametrize(("ok", "error", "exit_code"), [(1, 0, 0), (1, 9, 0), (0, 1, 1), (0, 0, 0)])
def test_the_exit_code_is_1_only_when_every_row_failed(ok: int, error: int, exit_code: int):
    totals = Totals(rows_ok=ok, rows_error=error)
    assert Summary(output="o", model="m", totals=totals, elapsed_s=0).exit_code == exit_code
