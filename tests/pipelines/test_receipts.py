"""What ends a job while its receipts come in."""

from __future__ import annotations

import pytest

from pipelines.errors import JobError
from pipelines.receipt import Receipt
from pipelines.receipts import MIN_ROWS, below_error_rate
from pipelines.totals import Totals


def receipts(*pairs: tuple[int, int]) -> list[Receipt]:
    return [
        Receipt(shard_id=str(number), totals=Totals(rows_ok=ok, rows_error=bad), first_error="it is full")
        for number, (ok, bad) in enumerate(pairs)
    ]


def test_a_job_whose_rows_all_fail_ends_early_with_the_reason():
    seen: list[Receipt] = []
    with pytest.raises(JobError, match=r"120 of the first 120 rows failed, .* = 1 .*: it is full$"):
        seen.extend(below_error_rate(receipts((0, 60), (0, 60), (0, 60)), 1.0))


@pytest.mark.parametrize(
    ("max_error_rate", "pairs", "received"),
    [
        (None, [(0, 200), (0, 200)], 2),
        (0.5, [(0, MIN_ROWS - 1)], 1),
        (0.5, [(100, 99), (0, 1)], None),
        (0.5, [(100, 99), (1, 1)], 2),
        (1.0, [(1, 1000), (0, 1000)], 2),
        (0.001, [(1000, 0), (998, 2)], None),
    ],
)
def test_the_share_of_failed_rows_decides(
    max_error_rate: float | None, pairs: list[tuple[int, int]], received: int | None
):
    stream = below_error_rate(receipts(*pairs), max_error_rate)
    if received is None:
        with pytest.raises(JobError):
            list(stream)
    else:
        assert len(list(stream)) == received
