"""The stream of receipts, and what ends a job while it runs."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

import pyarrow as pa
import ray.data
from ray.exceptions import RayError

from pipelines.errors import JobError, job_error
from pipelines.lease import Lease
from pipelines.receipt import Receipt, receipt_from_record

# A share of fewer rows says little.
MIN_ROWS = 100


def follow(receipts: ray.data.Dataset) -> Generator[Receipt]:
    """Receipts as they come. Raises what ended the job: a `JobError` of the kind that it was elsewhere.

    Close it before Ray is shut down: left to the garbage collector, Ray Data would start Ray anew for that.
    """
    batches = iter(receipts.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    assert isinstance(batches, Generator)
    try:
        for batch in batches:
            assert isinstance(batch, pa.Table) and batch.num_rows == 1
            receipt = receipt_from_record(batch.to_pylist()[0])
            if receipt.failure is not None:
                raise job_error(receipt.failure, receipt.exit_code)
            yield receipt
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        # Ray adds advice about its own settings in further lines.
        reason = str(cause).splitlines()[0] if str(cause) else "no reason given"
        raise JobError(
            reason if isinstance(cause, JobError) else f"{type(cause).__name__}: {reason}"
        ) from error
    finally:
        batches.close()


def while_leased(receipts: Iterable[Receipt], lease: Lease) -> Iterator[Receipt]:
    """Receipts for as long as the output is this driver's. Raises `LeaseLost`."""
    for receipt in receipts:
        lease.check()
        yield receipt


def below_error_rate(receipts: Iterable[Receipt], max_error_rate: float | None) -> Iterator[Receipt]:
    """Receipts until too many rows have failed. Raises `JobError` then."""
    rows = errors = 0
    reason: str | None = None
    for receipt in receipts:
        yield receipt
        rows += receipt.totals.rows
        errors += receipt.totals.rows_error
        reason = receipt.first_error or reason
        if max_error_rate is not None and rows >= MIN_ROWS and errors >= max_error_rate * rows:
            raise JobError(
                f"{errors:,} of the first {rows:,} rows failed, which max_error_rate = {max_error_rate:g} "
                f"does not allow; the last reason is: {reason}"
            )
