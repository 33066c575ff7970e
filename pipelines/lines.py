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
MAX_LINE_BYTES = 64 << 20
# What is kept of a line that is too long or broken off, for its error record.
KEPT_BYTES = 4096
# What is read at a time where nothing of it is kept.
SKIPPED_BYTES = 1 << 20
DECOMPRESSED_BUFFER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its line feed, or the reason why it has none."""

    offset: int
    raw: bytes
    error: RowError | None = None


def plain_lines(
    file: BinaryIO, start: int = 0, stop: int | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Line]:
    """Lines that start in [start, stop); the last one is read to its end, or to `max_line_bytes`."""
    offset = start
    if start:
        file.seek(start - 1)
        skipped = _skip_line(file, None if stop is None else stop - start)
        if skipped is None:
            return
        offset += skipped - 1
    while stop is None or offset < stop:
        raw = file.readline(max_line_bytes)
        if not raw:
            return
        if len(raw) < max_line_bytes or raw.endswith(b"\n"):
            yield Line(offset, raw.removesuffix(b"\n"))
            offset += len(raw)
        else:
            yield _too_long(offset, raw)
            offset += len(raw)
            skipped = _skip_line(file, None if stop is None else stop - offset)
            if skipped is None:
                return
            offset += skipped


def compressed_lines(file: BinaryIO, codec: str, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Lines of a whole gzip or zstd stream; offsets count decompressed bytes.

    A broken stream gives every line before the break and then one line that carries the error.
    """
    decoder = pa.CompressedInputStream(file, codec)
    stream = io.BufferedReader(decoder, DECOMPRESSED_BUFFER_BYTES)
    offset = 0
    too_long = False
    try:
        for line in plain_lines(stream, max_line_bytes=max_line_bytes):
            yield line
            too_long = line.error is not None
            offset = line.offset + (max_line_bytes if too_long else len(line.raw) + 1)
    except OSError as error:
        # What the decoder gave last is lost in buffers: decode again, byte by byte behind the last line.
        # Not where that line is too long for it, whose end may be far.
        rest = b"" if too_long else _decoded_rest(file, codec, offset)
        *whole, broken = rest.split(b"\n")
        for raw in whole:
            yield Line(offset, raw)
            offset += len(raw) + 1
        reason = f"the {codec} stream is broken behind this offset: {error}"
        yield Line(offset, broken[:KEPT_BYTES], RowError("unreadable_input", reason))


def _too_long(offset: int, start: bytes) -> Line:
    reason = f"the line has more than {len(start)} bytes, the most that is read of one"
    return Line(offset, start[:KEPT_BYTES], RowError("line_too_long", reason))


def _skip_line(file: BinaryIO, most: int | None) -> int | None:
    """Read past the next line feed; how many bytes that took, at the end of the file what there was.

    None where the next line starts behind `most` bytes: it is another's.
    """
    skipped = 0
    while most is None or skipped < most:
        piece = file.readline(SKIPPED_BYTES)
        skipped += len(piece)
        if not piece or piece.endswith(b"\n"):
            return skipped
    return None


def _decoded_rest(file: BinaryIO, codec: str, start: int) -> bytes:
    """What a broken stream holds from `start` to the break."""
    file.seek(0)
    decoder = pa.CompressedInputStream(file, codec)
    rest = bytearray()
    try:
        while start > 0:
            start -= len(decoder.read(min(start, DECOMPRESSED_BUFFER_BYTES)))
        while byte := decoder.read(1):
            rest += byte
    except OSError:
        pass
    return bytes(rest)
