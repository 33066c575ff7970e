"""Parquet rows as the JSON values that a line of JSONL would hold."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson
import pyarrow as pa

from pipelines.inputs import InputFile, parquet_file
from pipelines.rows import RowError
from pipelines.shards import Span
from pipelines.storage import Store

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# Rows decoded at a time: enough to be fast, few enough that long conversations stay small in memory.
BATCH_ROWS = 256
# A column with missing integers comes out of data frames as floating point.
_INTEGERS = frozenset({"max_tokens", "top_k", "seed", "logprobs"})

Record = dict[str, Any]


class SpanRecords:
    """Reads Parquet spans one after the other; those that cut one row group share one pass over it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stream: BinaryIO | None = None
        self._input: InputFile | None = None
        self._file: pq.ParquetFile | None = None
        self._group: _Group | None = None

    def __enter__(self) -> SpanRecords:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def read(self, span: Span) -> Iterator[tuple[int, Record | RowError]]:
        """Number and record of each row of a span, or the reason why a row has none."""
        assert span.row_group is not None and span.stop is not None
        if self._input != span.file:
            self._open(span.file)
        if self._group is None or self._group.number != span.row_group:
            assert self._file is not None
            self._group = _Group(self._file, span.row_group, span.group_start)
        return self._group.read(span.start, span.stop)

    def _open(self, file: InputFile) -> None:
        self._close()
        self._stream = self._store.open(file.key)
        self._file, self._input, self._group = parquet_file(self._stream, file.key), file, None

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class _Group:
    """One pass over a row group; where it breaks off, every row behind has the reason."""

    def __init__(self, file: pq.ParquetFile, number: int, start: int) -> None:
        self.number = number
        self._records = group_records(file, number)
        self._row = start
        self._failure: RowError | None = None

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Record | RowError]]:
        while self._row < stop:
            number, record = self._row, self._next()
            self._row += 1
            if number >= start:
                yield number, record

    def _next(self) -> Record | RowError:
        if self._failure is None:
            try:
                return next(self._records)
            except (pa.ArrowException, OSError, StopIteration) as error:
                reason = (
                    f"row group {self.number} cannot be decoded: {error or 'it has fewer rows than it says'}"
                )
                self._failure = RowError("unreadable_input", reason)
        return self._failure


def group_records(file: pq.ParquetFile, row_group: int) -> Iterator[Record | RowError]:
    """The rows of one row group, in order."""
    for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[row_group]):
        try:
            yield from map(_record, batch.to_pylist(maps_as_pydicts="lossy"))
        except UnicodeDecodeError:
            # Files may hold any bytes in a text column.
            for number in range(batch.num_rows):
                yield _one_record(batch.slice(number, 1))


def record_text(record: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON."""
    return orjson.dumps(record)


def _one_record(batch: pa.RecordBatch) -> Record | RowError:
    try:
        return _record(batch.to_pylist(maps_as_pydicts="lossy")[0])
    except UnicodeDecodeError as error:
        return RowError(
            "invalid_utf8", f"not UTF-8: a text of the row has byte 0x{error.object[error.start]:02x}"
        )


def _record(values: Mapping[str, Any]) -> Record:
    return {name: _json_value(value) for name, value in values.items()} | _integers(values)


def _integers(record: Mapping[str, Any]) -> dict[str, int]:
    floats = {name: record[name] for name in _INTEGERS & record.keys() if isinstance(record[name], float)}
    return {name: int(value) for name, value in floats.items() if value.is_integer()}


def _json_value(value: Any) -> Any:
    """A value of an Arrow column as JSON has it; null fields of structs are fields that are not there."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _json_value(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
