"""Lines and their offsets, from plain and compressed files."""

from __future__ import annotations

import gzip
import io
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import lines
from pipelines.lines import compressed_lines, plain_lines

TEXTS = st.lists(st.text(alphabet="a\r\u2028\x85é", max_size=6), max_size=12).map(
    lambda texts: "\n".join(texts).encode()
)


def expected(data: bytes) -> list[tuple[int, bytes]]:
    """Offsets and lines, found by splitting the whole text."""
    found, offset = [], 0
    for line in data.split(b"\n"):
        if offset < len(data):
            found.append((offset, line))
        offset += len(line) + 1
    return found


def read(stream) -> list[tuple[int, bytes]]:
    return [(line.offset, line.raw) for line in stream]


@given(data=TEXTS, cuts=st.lists(st.integers(0, 80), max_size=4))
def test_ranges_share_out_every_line_exactly_once(data: bytes, cuts: list[int]):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [read(plain_lines(io.BytesIO(data), *edge)) for edge in pairwise(edges)]
    assert [line for part in parts for line in part] == expected(data)


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
@given(data=TEXTS)
def test_compressed_files_have_the_same_lines(codec: str, data: bytes):
    packed = pa.compress(data, codec, asbytes=True) if codec == "zstd" else gzip.compress(data)
    assert read(compressed_lines(io.BytesIO(packed), codec)) == expected(data)


def test_several_streams_in_one_file_are_one_text():
    packed = gzip.compress(b"a\nb") + gzip.compress(b"c\nd\n")
    assert read(compressed_lines(io.BytesIO(packed), "gzip")) == [(0, b"a"), (2, b"bc"), (5, b"d")]


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_broken_stream_keeps_what_came_before_and_ends_with_the_reason(codec: str):
    data = b"".join(b"%d\n" % number for number in range(200_000))
    packed = gzip.compress(data) if codec == "gzip" else pa.compress(data, codec, asbytes=True)
    *whole, last = compressed_lines(io.BytesIO(packed[: len(packed) * 3 // 4]), codec)
    assert len(whole) > 10_000
    assert [line.raw for line in whole] == data.split(b"\n")[: len(whole)]
    assert (last.raw, last.error.code) == (b"", "unreadable_input")
    assert last.offset == whole[-1].offset + len(whole[-1].raw) + 1


def test_a_line_that_is_too_long_is_an_error_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(lines, "KEPT_BYTES", 4)
    found = list(plain_lines(io.BytesIO(b"123456789\n1234567890\n" + b"x" * 35 + b"\nend")))
    assert [(line.offset, line.raw, line.error and line.error.code) for line in found] == [
        (0, b"123456789", None),
        (10, b"1234", "line_too_long"),
        (21, b"xxxx", "line_too_long"),
        (57, b"end", None),
    ]
    assert "the line has 36 bytes" in found[2].error.message
