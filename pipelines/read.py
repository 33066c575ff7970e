"""Bytes to shards: readers parse and check every row before an engine sees it.

One shard is one row of the Ray Data dataset (`SHARD_SCHEMA`): Ray splits and merges blocks, never rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from dflash_engine.heap import settle_heap
from dflash_engine.request import SamplingParams
from pipelines.config import ShardConfig
from pipelines.inputs import FileKind, Input, file_lines
from pipelines.line_stream import LineStream
from pipelines.lines import Line, plain_lines
from pipelines.parse import RowParser, error_row
from pipelines.records import SpanRecords, record_text
from pipelines.rows import InputRow, RowError, encode_rows
from pipelines.shards import Piece, Span, read_tasks
from pipelines.storage import Store

SHARD_SCHEMA = pa.schema(
    [
        ("shard_id", pa.string()),
        ("num_rows", pa.int64()),
        ("input_bytes", pa.int64()),
        ("payload", pa.large_binary()),
    ]
)
# Rows of each of some files, from all over the input, that decide the types of the carried columns.
SAMPLE_ROWS = 256
SAMPLE_FILES = 16


@dataclass(frozen=True, slots=True)
class ShardRows:
    """A shard with its rows; `input_bytes` is its share of the input's size, for progress."""

    shard_id: str
    rows: tuple[InputRow, ...]
    input_bytes: int

    def as_table(self) -> pa.Table:
        """One row of `SHARD_SCHEMA`."""
        values = [self.shard_id, len(self.rows), self.input_bytes, encode_rows(self.rows)]
        return pa.table([[value] for value in values], schema=SHARD_SCHEMA)


@dataclass(frozen=True, slots=True)
class Reader:
    """What reading needs to know besides the piece."""

    store: Store
    shard: ShardConfig
    defaults: SamplingParams
    done: frozenset[str] = frozenset()
    """Shard ids already written; they are passed over."""
    _parser: RowParser = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parser", RowParser(self.defaults))

    def shards(self, pieces: Sequence[Piece]) -> Iterator[ShardRows]:
        """The shards of some pieces, in order. Slices of one Parquet row group share one pass over it."""
        with SpanRecords(self.store) as records:
            for piece in pieces:
                if piece.compressed:
                    yield from self._streamed(piece)
                else:
                    spans = (self._span(span, records) for span in piece.spans)
                    yield from self._split(piece, [row for rows in spans for row in rows])

    def _split(self, piece: Piece, rows: Sequence[InputRow]) -> Iterator[ShardRows]:
        """The rows of a piece in as few shards as `shard.rows` allows, of equal length."""
        parts = -(-len(rows) // self.shard.rows)
        length = -(-len(rows) // parts) if parts else 1
        for number, start in enumerate(range(0, len(rows), length), start=1):
            shard_id = piece.shard_id if parts == 1 else f"{piece.shard_id}-{number}of{parts}"
            if shard_id not in self.done:
                yield ShardRows(shard_id, tuple(rows[start : start + length]), piece.input_bytes // parts)

    def _streamed(self, piece: Piece) -> Iterator[ShardRows]:
        """Compressed files in runs of at most `shard.rows`, ended early where they reach `shard.bytes`."""
        files = [span.file for span in piece.spans]
        with closing(LineStream(self.store, files, self.shard.max_line_bytes)) as stream:
            position = 0
            for number, run in enumerate(stream.runs(self.shard.rows, self.shard.bytes)):
                shard_id = f"{piece.file_number:05d}-{number:06d}"
                reached = stream.reached
                # Whoever wrote it has parsed it.
                if shard_id not in self.done:
                    rows = tuple(row for key, line in run for row in self.rows([line], key))
                    yield ShardRows(shard_id, rows, reached - position)
                position = reached

    def _span(self, span: Span, records: SpanRecords) -> Iterator[InputRow]:
        key = span.file.key
        if span.row_group is None:
            with self.store.open(key) as stream:
                yield from self.rows(
                    plain_lines(stream, span.start, span.stop, self.shard.max_line_bytes), key
                )
            return
        for number, record in records.read(span):
            if isinstance(record, RowError):
                yield error_row(key, number, b"", record)
            else:
                yield self._parser.values(record, raw=record_text(record), file=key, offset=number)

    def rows(self, lines: Iterable[Line], key: str) -> Iterator[InputRow]:
        """A row for each line of a file that is not blank."""
        for line in lines:
            if line.error is not None:
                yield error_row(key, line.offset, line.raw, line.error)
            elif row := self._parser.line(line.raw, file=key, offset=line.offset):
                yield row

    def first_rows(self, span: Span, count: int) -> Iterator[InputRow]:
        """The first rows of a file."""
        if span.row_group is None:
            with self.store.open(span.file.key) as stream:
                lines = file_lines(stream, span.file.kind, self.shard.max_line_bytes)
                yield from islice(self.rows(lines, span.file.key), count)
        else:
            with SpanRecords(self.store) as records:
                yield from islice(self._span(span, records), count)


class ShardSource(Datasource):
    """The shards that are still to be done, as a Ray Data source; each read task streams its own."""

    def __init__(self, pieces: Sequence[Piece], reader: Reader) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pieces = pieces
        self._reader = reader

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [
            ReadTask(_task(self._reader, pieces), unknown, schema=SHARD_SCHEMA)
            for pieces in read_tasks(self._pieces)
        ]


def _task(reader: Reader, pieces: Sequence[Piece]) -> Callable[[], Iterator[pa.Table]]:
    def read() -> Iterator[pa.Table]:
        settle_heap()
        for shard in reader.shards(pieces):
            yield shard.as_table()

    return read


def sample_rows(source: Input, defaults: SamplingParams) -> Iterator[InputRow]:
    """First rows of some files, to find the types of the carried columns."""
    reader = Reader(source.store, ShardConfig(), defaults)
    for file in source.files[:: -(-len(source.files) // SAMPLE_FILES) or 1]:
        if file.kind is not FileKind.PARQUET:
            yield from reader.first_rows(Span(file), SAMPLE_ROWS)
        elif sum(file.group_rows):
            group = next(number for number, rows in enumerate(file.group_rows) if rows)
            yield from reader.first_rows(Span(file, 0, file.group_rows[group], group), SAMPLE_ROWS)
