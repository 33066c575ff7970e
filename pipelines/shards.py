"""The input cut into shards by rule, so that every run of a job cuts it alike.

A piece is what one read covers: a byte range of a plain file, a slice of a Parquet row group, or a whole
compressed file. Plain and Parquet pieces are one shard each (`00002-000017`); where short lines bring
more rows into a byte range than a shard may have, it becomes `00002-000017-1of3` and so on. A compressed
file is streamed once and cut into `00002-000000`, `00002-000001`, …
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.config import ShardConfig
from pipelines.inputs import FileKind, Input, InputFile, parquet_file

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# The last four shards' worth of input is shared out in ever smaller shards, down to a quarter: engines
# end together within a quarter of a shard, at about twice as many objects for that tail.
TAIL_SHARDS = 4
# A byte range is made for this share of `shard.rows`, so that most ranges need not be split by their rows.
FILL = 0.9
# Starting a read task takes Ray some 15 ms; more tasks than this would keep the engines waiting at first.
MAX_READ_TASKS = 1000

_PART_OF = re.compile(r"(\d+-\d+)-\d+of(\d+)")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one read covers: lines that start in bytes [start, stop), or those rows of a Parquet file."""

    file: InputFile
    file_number: int
    number: int
    input_bytes: int
    """Share of the input's size, for progress."""
    start: int = 0
    stop: int | None = None
    row_group: int | None = None
    row_group_start: int = 0

    @property
    def shard_id(self) -> str:
        """The id where the piece is one shard."""
        return f"{self.file_number:05d}-{self.number:06d}"

    @property
    def compressed(self) -> bool:
        return self.file.kind in (FileKind.GZIP, FileKind.ZSTD)


def plan(source: Input, shard: ShardConfig) -> list[Piece]:
    """All pieces of the input, in its order."""
    pieces: list[Piece] = []
    remaining = sum(_size(file) for file in source.files)
    for number, file in enumerate(source.files):
        if file.kind is FileKind.PLAIN:
            pieces += _byte_ranges(file, number, shard, remaining)
        elif file.kind is FileKind.PARQUET:
            with source.store.open(file.key) as stream:
                pieces += _row_slices(parquet_file(stream, file.key), file, number, shard, remaining)
        else:
            pieces.append(Piece(file, number, 0, file.size_bytes))
        remaining -= _size(file)
    return pieces


def left_to_do(pieces: Iterable[Piece], done: Iterable[str]) -> list[Piece]:
    """Pieces that are not wholly among the shard ids already written.

    A compressed file always is left: how many shards it has shows only when it is read to its end.
    """
    written = set(done)
    parts = Counter(match.groups() for name in written if (match := _PART_OF.fullmatch(name)))
    written |= {shard_id for (shard_id, count), found in parts.items() if found == int(count)}
    return [piece for piece in pieces if piece.compressed or piece.shard_id not in written]


def read_tasks(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces grouped for one reader each; slices of one row group stay together, so it is decoded once."""
    size = -(-len(pieces) // MAX_READ_TASKS) or 1
    tasks: list[list[Piece]] = []
    for piece in pieces:
        last = tasks[-1] if tasks else []
        together = last and _row_group(piece) is not None and _row_group(piece) == _row_group(last[-1])
        if together or (last and len(last) < size and not piece.compressed and not last[-1].compressed):
            last.append(piece)
        else:
            tasks.append([piece])
    return tasks


def _row_group(piece: Piece) -> tuple[int, int] | None:
    return None if piece.row_group is None else (piece.file_number, piece.row_group)


def _size(file: InputFile) -> int:
    """Bytes of a file that take part in the tapering."""
    if file.kind is FileKind.PLAIN:
        return file.size_bytes if file.stop is None else min(file.size_bytes, file.stop)
    return file.size_bytes if file.kind is FileKind.PARQUET else 0


def _tapered(whole: float, remaining: float) -> float:
    """Size of the next piece: a whole shard, towards the end a quarter of the rest, or a quarter shard."""
    return max(whole / TAIL_SHARDS, min(whole, remaining / TAIL_SHARDS))


def _byte_ranges(file: InputFile, file_number: int, shard: ShardConfig, remaining: float) -> list[Piece]:
    whole = min(shard.bytes, FILL * shard.rows * file.line_bytes)
    end = _size(file)
    pieces: list[Piece] = []
    start = 0
    while start < end:
        stop = min(end, start + max(1, round(_tapered(whole, remaining - start))))
        pieces.append(Piece(file, file_number, len(pieces), stop - start, start, stop))
        start = stop
    return pieces


def _row_slices(
    parquet: pq.ParquetFile, file: InputFile, file_number: int, shard: ShardConfig, remaining: float
) -> list[Piece]:
    total = parquet.metadata.num_rows
    end = total if file.stop is None else min(total, file.stop)
    whole = min(float(shard.rows), shard.bytes / max(1.0, file.line_bytes))
    stored_bytes = file.size_bytes / max(1, total)
    pieces: list[Piece] = []
    group_start = 0
    for group in range(parquet.num_row_groups):
        group_stop = group_start + parquet.metadata.row_group(group).num_rows
        start = group_start
        while start < min(group_stop, end):
            rows = _tapered(whole, remaining / stored_bytes - start)
            stop = min(group_stop, end, start + max(1, round(rows)))
            size = round((stop - start) * stored_bytes)
            pieces.append(Piece(file, file_number, len(pieces), size, start, stop, group, group_start))
            start = stop
        group_start = group_stop
    return pieces
