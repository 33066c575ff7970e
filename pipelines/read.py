"""Bytes to shards: readers parse and check every row before an engine sees it.

One shard is one row of the Ray Data dataset (`SHARD_SCHEMA`): Ray splits and merges blocks, never rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from dflash_engine.request import SamplingParams
from pipelines.config import ShardConfig
from pipelines.inputs import FileKind, Input, file_lines, parquet_file
from pipelines.lines import Line, plain_lines
from pipelines.parse import error_row, parse_line, parse_values
from pipelines.records import group_records, record_text
from pipelines.rows import InputRow, RowError, encode_rows
from pipelines.shards import Piece, read_tasks
from pipelines.storage import Store

SHARD_SCHEMA = pa.schema(
    [
        ("shard_id", pa.string()),
        ("file", pa.string()),
        ("num_rows", pa.int64()),
        ("input_bytes", pa.int64()),
        ("payload", pa.large_binary()),
    ]
)
# Rows of each of the first files that decide the types of the carried columns.
SAMPLE_ROWS = 256
SAMPLE_FILES = 8


@dataclass(frozen=True, slots=True)
class ShardRows:
    """A shard with its rows; `input_bytes` is its share of the input's size, for progress."""

    shard_id: str
    file: str
    rows: tuple[InputRow, ...]
    input_bytes: int

    def as_table(self) -> pa.Table:
        """One row of `SHARD_SCHEMA`."""
        values = [self.shard_id, self.file, len(self.rows), self.input_bytes, encode_rows(self.rows)]
        return pa.table([[value] for value in values], schema=SHARD_SCHEMA)


@dataclass(frozen=True, slots=True)
class Reader:
    """What reading needs to know besides the piece."""

    store: Store
    shard: ShardConfig
    defaults: SamplingParams
    done: frozenset[str] = frozenset()
    """Shard ids already written; they are passed over."""

    def shards(self, pieces: Sequence[Piece]) -> Iterator[ShardRows]:
        """The shards of some pieces. Slices of one Parquet row group share one pass over it."""
        if pieces[0].row_group is None:
            for piece in pieces:
                yield from self._compressed(piece) if piece.compressed else self._byte_range(piece)
        else:
            yield from self._row_slices(pieces)

    def _byte_range(self, piece: Piece) -> Iterator[ShardRows]:
        with self.store.open(piece.file.key) as stream:
            rows = tuple(self.rows(plain_lines(stream, piece.start, piece.stop), piece.file.key))
        runs = self._evenly(rows)
        for number, run in enumerate(runs, start=1):
            shard_id = piece.shard_id if len(runs) == 1 else f"{piece.shard_id}-{number}of{len(runs)}"
            share = piece.input_bytes // len(runs)
            if shard_id not in self.done:
                yield ShardRows(shard_id, piece.file.key, run, share)

    def _compressed(self, piece: Piece) -> Iterator[ShardRows]:
        with self.store.open(piece.file.key) as stream:
            rows = self.rows(file_lines(stream, piece.file.kind), piece.file.key)
            position = 0
            for number, run in enumerate(self._runs(islice(rows, piece.file.stop))):
                shard_id = f"{piece.file_number:05d}-{number:06d}"
                # A stream read to its end is closed by the decompressor.
                reached = piece.file.size_bytes if stream.closed else stream.tell()
                if shard_id not in self.done:
                    yield ShardRows(shard_id, piece.file.key, run, reached - position)
                position = reached

    def _row_slices(self, pieces: Sequence[Piece]) -> Iterator[ShardRows]:
        first = pieces[0]
        assert first.row_group is not None
        with self.store.open(first.file.key) as stream:
            file = parquet_file(stream, first.file.key)
            records = group_records(file, first.row_group)
            position = first.row_group_start
            for piece in pieces:
                assert piece.stop is not None
                wanted = islice(records, piece.start - position, piece.stop - position)
                rows = tuple(self._records(wanted, piece))
                position = piece.stop
                yield ShardRows(piece.shard_id, piece.file.key, rows, piece.input_bytes)

    def _records(self, records: Iterator[dict[str, Any]], piece: Piece) -> Iterator[InputRow]:
        """A row for each number of the slice; a row group that breaks off gives error rows for the rest."""
        assert piece.stop is not None
        key = piece.file.key
        number = piece.start
        try:
            for record in records:
                raw = record_text(record)
                yield parse_values(record, raw=raw, file=key, offset=number, defaults=self.defaults)
                number += 1
        except (pa.ArrowException, OSError) as error:
            for rest in range(number, piece.stop):
                reason = f"row group {piece.row_group} cannot be decoded: {error}"
                yield error_row(key, rest, b"", RowError("unreadable_input", reason))

    def rows(self, lines: Iterable[Line], key: str) -> Iterator[InputRow]:
        """A row for each line of a file that is not blank."""
        for line in lines:
            if line.error is not None:
                yield error_row(key, line.offset, line.raw, line.error)
            elif row := parse_line(line.raw, file=key, offset=line.offset, defaults=self.defaults):
                yield row

    def _evenly(self, rows: tuple[InputRow, ...]) -> list[tuple[InputRow, ...]]:
        """Rows in as few runs as `shard.rows` allows, of equal length."""
        length = -(-len(rows) // (-(-len(rows) // self.shard.rows) or 1)) or 1
        return [rows[start : start + length] for start in range(0, len(rows), length)]

    def _runs(self, rows: Iterable[InputRow]) -> Iterator[tuple[InputRow, ...]]:
        """Rows in runs of at most `shard.rows`, ended early where they reach `shard.bytes`."""
        run: list[InputRow] = []
        size = 0
        for row in rows:
            run.append(row)
            size += len(row.raw) + 1
            if len(run) == self.shard.rows or size >= self.shard.bytes:
                yield tuple(run)
                run, size = [], 0
        if run:
            yield tuple(run)


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
        for shard in reader.shards(pieces):
            yield shard.as_table()

    return read


def sample_rows(source: Input, defaults: SamplingParams) -> Iterator[InputRow]:
    """First rows of the first files, to find the types of the carried columns."""
    reader = Reader(source.store, ShardConfig(), defaults)
    for file in source.files[:SAMPLE_FILES]:
        with source.store.open(file.key) as stream:
            if file.kind is FileKind.PARQUET:
                groups = range(min(1, parquet_file(stream, file.key).num_row_groups))
                piece = [Piece(file, 0, 0, 0, 0, SAMPLE_ROWS, group) for group in groups]
                yield from (row for shard in (reader.shards(piece) if piece else ()) for row in shard.rows)
            else:
                yield from islice(reader.rows(file_lines(stream, file.kind), file.key), SAMPLE_ROWS)
