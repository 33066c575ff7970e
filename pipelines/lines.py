"""Lines of plain and compressed files with the byte offset that each one starts at.

Lines end at 0x0A and nowhere else: U+2028, U+0085 and a lone carriage return may stand inside a JSON text.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from pipelines.rows import RowError

# A file that is no JSONL at all can be one "line" of any size; more than this of it is not held in memory.
MAX_LINE_BYTES = 32 << 20
# What is kept of a line that is too long, for its error record.
KEPT_BYTES = 4096
# Small, because what a broken stream had in its buffer is lost with it.
DECOMPRESSED_BUFFER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its line feed, or the reason why it has none."""

    offset: int
    raw: bytes
    error: RowError | None = None


def plain_lines(file: BinaryIO, start: int = 0, stop: int | None = None) -> Iterator[Line]:
    """Lines that start in [start, stop); the last one is read to its end."""
    offset = start
    if start:
        file.seek(start - 1)
        offset += _skip_line(file) - 1
    while stop is None or offset < stop:
        line, length = _read_line(file, offset)
        if not length:
            return
        yield line
        offset += length


def compressed_lines(file: BinaryIO, codec: str) -> Iterator[Line]:
    """Lines of a whole gzip or zstd stream; offsets count decompressed bytes.

    A broken stream ends with one line that carries the error; what was read before stays.
    """
    stream = io.BufferedReader(pa.CompressedInputStream(file, codec), DECOMPRESSED_BUFFER_BYTES)
    offset = 0
    while True:
        try:
            line, length = _read_line(stream, offset)
        except OSError as error:
            reason = f"the {codec} stream is broken behind this offset: {error}"
            yield Line(offset, b"", RowError("unreadable_input", reason))
            return
        if not length:
            return
        yield line
        offset += length


def _read_line(file: BinaryIO, offset: int) -> tuple[Line, int]:
    """A line and how many bytes it takes in the file; 0 at the end."""
    raw = file.readline(MAX_LINE_BYTES)
    length = len(raw)
    if length < MAX_LINE_BYTES or raw.endswith(b"\n"):
        return Line(offset, raw.removesuffix(b"\n")), length
    length += _skip_line(file)
    reason = RowError("line_too_long", f"the line has {length} bytes; at most {MAX_LINE_BYTES} are read")
    return Line(offset, raw[:KEPT_BYTES], reason), length


def _skip_line(file: BinaryIO) -> int:
    """Read to the next line start; how many bytes that took."""
    skipped = 0
    while piece := file.readline(MAX_LINE_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
