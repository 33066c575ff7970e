"""The input cut into shards by rule, so that every run of a job cuts it alike.

A piece is what one read covers: byte ranges of plain files, slices of Parquet row groups, or whole compressed
files. What is small is put together, what is large is cut, and only the files and the config decide how.

Plain and Parquet pieces are one shard each, named after the file that they begin in and their number there
(`00002-000017`); where short lines bring more rows into a byte range than a shard may have, it becomes
`00002-000017-1of3` and so on. Compressed files are streamed once and cut by their lines into `00002-000000`,
`00002-000001`, …: how many there are shows only at the end, so these do not taper.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipelines.config import BatchConfig, ShardConfig
from pipelines.inputs import FileKind, Input, InputFile

# The last four shards' worth of input is shared out in ever smaller shards, down to a quarter: engines
# end together within a quarter of a shard, at about twice as many objects for that tail.
TAIL_SHARDS = 4
# A byte range is made for this share of `shard.rows`, so that most ranges need not be split by their rows.
FILL = 0.9
# Nine ninths of a shard are a shard.
ROUNDING = 1e-9
# Starting a read task takes Ray some 15 ms, so small pieces share one while there are tasks enough to keep
# every reader at work, and large jobs have about this many tasks.
READ_TASKS = 1000
MIN_READ_TASKS = 64
MAX_SMALL_PIECES = 16
SMALL_TASK_BYTES = 4 << 20
# The shards of a task leave it together, when the last one is read.
MAX_TASK_BYTES = 64 << 20

_PART_OF = re.compile(r"(\d+-\d+)-\d+of(\d+)")


class Span(NamedTuple):
    """Lines of a file that start in bytes [start, stop), rows [start, stop) of Parquet, or a whole file.

    A large file of short lines has half a million: named tuples take a fifth of a frozen dataclass's time.
    """

    file: InputFile
    start: int = 0
    stop: int | None = None
    row_group: int | None = None
    group_start: int = 0
    """Row number that the row group starts at."""


class Piece(NamedTuple):
    """What one read covers; `number` counts the pieces that begin in the same file."""

    file_number: int
    number: int
    spans: tuple[Span, ...]
    input_bytes: int
    """Share of the input's size, for progress."""

    @property
    def shard_id(self) -> str:
        """The id where the piece is one shard."""
        return f"{self.file_number:05d}-{self.number:06d}"

    @property
    def compressed(self) -> bool:
        return self.spans[0].file.compressed


def cut_rule(config: BatchConfig) -> ShardConfig:
    """`config.shard` with its rows capped so that generating a shard takes at most `max_lost_s`.

    Counted with the tokens of a longest answer and the speed that the config states, not with measured ones:
    a rerun must find the same shards. Rows that ask for more tokens of their own are not seen here.
    """
    shard = config.shard
    if shard.max_lost_s is None or shard.tokens_per_s is None:
        return shard
    answer_tokens = config.sampling.max_tokens or config.engine.default_max_tokens
    rows = max(1, int(shard.max_lost_s * shard.tokens_per_s / answer_tokens))
    return shard.model_copy(update={"rows": min(shard.rows, rows)})


def plan(source: Input, shard: ShardConfig) -> list[Piece]:
    """All pieces of the input, in its order."""
    stretches = [stretch for item in enumerate(source.files) for stretch in _stretches(*item, shard)]
    cutter = _Cutter(sum(stretch.shards for stretch in stretches if not stretch.compressed))
    for stretch in stretches:
        cutter.add(stretch)
    cutter.close()
    return cutter.pieces


def left_to_do(pieces: Iterable[Piece], done: Iterable[str]) -> list[Piece]:
    """Pieces that are not wholly among the shard ids already written.

    Compressed files always are left: how many shards they have shows only when they are read to their end.
    """
    written = set(done)
    parts = Counter(match.groups() for name in written if (match := _PART_OF.fullmatch(name)))
    written |= {shard_id for (shard_id, count), found in parts.items() if found == int(count)}
    return [piece for piece in pieces if piece.compressed or piece.shard_id not in written]


def read_tasks(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces grouped for one reader each; slices of one row group stay together, so it is decoded once."""
    total_bytes = sum(piece.input_bytes for piece in pieces)
    most_bytes = max(SMALL_TASK_BYTES, min(MAX_TASK_BYTES, total_bytes // READ_TASKS))
    most = max(1, min(MAX_SMALL_PIECES, len(pieces) // MIN_READ_TASKS), -(-len(pieces) // READ_TASKS))
    tasks: list[list[Piece]] = []
    task_bytes = 0
    for piece in pieces:
        last = tasks[-1] if tasks else []
        alone = piece.compressed or (last and last[-1].compressed)
        fits = len(last) < most and task_bytes + piece.input_bytes <= most_bytes
        if last and (_share_a_group(last[-1], piece) or (fits and not alone)):
            last.append(piece)
            task_bytes += piece.input_bytes
        else:
            tasks.append([piece])
            task_bytes = piece.input_bytes
    return tasks


def _share_a_group(before: Piece, after: Piece) -> bool:
    one, other = before.spans[-1], after.spans[0]
    return one.row_group is not None and one.row_group == other.row_group and one.file == other.file


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A run of input that may be cut anywhere between its units: bytes of a plain file, rows of Parquet."""

    file_number: int
    span: Span
    units: int
    shard_units: float
    """How many of them make a whole shard."""
    unit_bytes: float

    @property
    def shards(self) -> float:
        return self.units / self.shard_units

    @property
    def input_bytes(self) -> int:
        return round(self.units * self.unit_bytes)

    @property
    def compressed(self) -> bool:
        return self.span.file.compressed


def _stretches(file_number: int, file: InputFile, shard: ShardConfig) -> Iterator[_Stretch]:
    if file.compressed:
        yield _Stretch(file_number, Span(file), file.size_bytes, shard.bytes, 1)
    elif file.kind is FileKind.PLAIN:
        end = file.size_bytes if file.stop is None else min(file.size_bytes, file.stop)
        whole = min(shard.bytes, FILL * shard.rows * file.line_bytes)
        if end:
            yield _Stretch(file_number, Span(file, 0, end), end, whole, 1)
    else:
        total = sum(file.group_rows)
        whole = min(float(shard.rows), shard.bytes / max(1.0, file.line_bytes))
        start = 0
        for group, rows in enumerate(file.group_rows):
            stop = min(start + rows, total if file.stop is None else file.stop)
            if start < stop:
                span = Span(file, start, stop, group, start)
                yield _Stretch(file_number, span, stop - start, whole, file.size_bytes / total)
            start += rows


class _Cutter:
    """Puts short stretches in a row together and cuts long ones; `shards` is what is left of the input."""

    def __init__(self, shards: float) -> None:
        self.pieces: list[Piece] = []
        self._begun: Counter[int] = Counter()
        self._left = shards
        self._pack: list[_Stretch] = []
        self._filled = 0.0

    def add(self, stretch: _Stretch) -> None:
        room = 1.0 if stretch.compressed else self._room()
        others = self._pack and self._pack[0].compressed != stretch.compressed
        if others or self._filled + stretch.shards > room + ROUNDING:
            self.close()
        if not stretch.compressed:
            stretch = self._cut(stretch)
        self._pack.append(stretch)
        self._filled += stretch.shards

    def close(self) -> None:
        """End the piece that small stretches are put into."""
        if not self._pack:
            return
        first = self._pack[0]
        spans = tuple(stretch.span for stretch in self._pack)
        input_bytes = sum(stretch.input_bytes for stretch in self._pack)
        self.pieces.append(Piece(first.file_number, self._begun[first.file_number], spans, input_bytes))
        self._begun[first.file_number] += 1
        self._left -= 0.0 if first.compressed else self._filled
        self._pack, self._filled = [], 0.0

    def _cut(self, stretch: _Stretch) -> _Stretch:
        """Pieces off the front of a stretch; the rest, which is at most one."""
        stop = stretch.span.stop
        assert stop is not None
        while stop - stretch.span.start > (units := max(1, round(self._room() * stretch.shard_units))):
            # As many whole shards as there are before the tail, or one of those in the tail.
            before_tail = int((self._left - TAIL_SHARDS) * stretch.shard_units / units)
            count = max(1, min(before_tail, (stop - stretch.span.start - 1) // units))
            stretch = self._cut_off(stretch, units, count)
        return stretch

    def _cut_off(self, stretch: _Stretch, units: int, count: int) -> _Stretch:
        """Pieces of so many units off the front of a stretch; the rest."""
        file, start, stop, row_group, group_start = stretch.span
        edge = start + units * count
        first = self._begun[stretch.file_number]
        input_bytes = round(units * stretch.unit_bytes)
        self.pieces += [
            Piece(
                stretch.file_number,
                number,
                (Span(file, at, at + units, row_group, group_start),),
                input_bytes,
            )
            for number, at in enumerate(range(start, edge, units), start=first)
        ]
        self._begun[stretch.file_number] += count
        self._left -= units * count / stretch.shard_units
        return replace(
            stretch, span=Span(file, edge, stop, row_group, group_start), units=stretch.units - units * count
        )

    def _room(self) -> float:
        """The next piece's share of a shard: a whole one, at the end a quarter of the rest or of a shard."""
        return max(1 / TAIL_SHARDS, min(1.0, self._left / TAIL_SHARDS))
