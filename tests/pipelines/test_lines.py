"""Lines and their offsets, from plain and compressed files."""

from __future__ import annotations

import gzip
import io
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import lines
from pipelines.lines import Line, compressed_lines, plain_lines

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


@settings(deadline=None)
@given(data=TEXTS, cuts=st.lists(st.integers(0, 80), max_size=4))
def test_ranges_share_out_every_line_exactly_once(data: bytes, cuts: list[int]):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [read(plain_lines(io.BytesIO(data), *edge)) for edge in pairwise(edges)]
    assert [line for part in parts for line in part] == expected(data)


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
@settings(deadline=None)
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
    assert last.error.code == "unreadable_input"
    assert last.offset == whole[-1].offset + len(whole[-1].raw) + 1
    assert data[last.offset :].startswith(last.raw)


def test_a_short_stream_that_breaks_off_keeps_its_lines_too():
    packed = gzip.compress(b"one\ntwo\nthree\n")
    broken = list(compressed_lines(io.BytesIO(packed[:-8]), "gzip"))
    assert [line.raw for line in broken] == [b"one", b"two", b"three", b""]
    garbage = list(compressed_lines(io.BytesIO(packed + b"garbage"), "gzip"))
    assert [line.raw for line in garbage] == [b"one", b"two", b"three", b""]
    assert garbage[-1].error.message.startswith("the gzip stream is broken behind this offset: ")


def test_a_stream_that_breaks_off_in_a_line_that_is_too_long_ends_with_the_reason():
    packed = gzip.compress(b"one\n" + bytes(range(97, 123)) * 5_000)[:-9]
    found = list(compressed_lines(io.BytesIO(packed), "gzip", max_line_bytes=100))
    assert [line.error and line.error.code for line in found] == [None, "line_too_long", "unreadable_input"]


def test_frames_of_zstd_are_one_text():
    packed = [pa.compress(part, "zstd", asbytes=True) for part in (b"a\nb", b"c\n")]
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00....".join([b"", *packed])
    assert read(compressed_lines(io.BytesIO(skipped), "zstd")) == [(0, b"a"), (2, b"bc")]


def test_a_line_that_is_too_long_is_an_error_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "KEPT_BYTES", 4)
    data = b"123456789\n1234567890\n" + b"x" * 35 + b"\nend"
    expected = [
        (0, b"123456789", None),
        (10, b"1234", "line_too_long"),
        (21, b"xxxx", "line_too_long"),
        (57, b"end", None),
    ]
    for found in (
        list(plain_lines(io.BytesIO(data), max_line_bytes=10)),
        list(compressed_lines(io.BytesIO(gzip.compress(data)), "gzip", max_line_bytes=10)),
    ):
        assert [(line.offset, line.raw, line.error and line.error.code) for line in found] == expected
        assert "the line has more than 10 bytes" in found[2].error.message


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=8), cuts=st.lists(st.integers(0, 120), max_size=5),
    most=st.integers(1, 12),
)  # fmt: skip
def test_ranges_share_out_lines_that_are_too_long_as_well(lengths: list[int], cuts: list[int], most: int):
    data = b"".join(b"x" * length + b"\n" for length in lengths)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [list(plain_lines(io.BytesIO(data), *edge, most)) for edge in pairwise(edges)]
    found: list[Line] = [line for part in parts for line in part]
    assert [line.offset for line in found] == [offset for offset, _ in expected(data)]
    assert [line.error is not None for line in found] == [length >= most for length in lengths]


class CountedBytes(io.BytesIO):
    """Counts what is read of it."""

    count = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        self.count += len(line)
        return line


def test_a_range_inside_a_long_line_does_not_read_on_to_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "SKIPPED_BYTES", 100)
    file = CountedBytes(b"x" * 100_000 + b"\n")
    assert list(plain_lines(file, 1000, 2000, 500)) == []
    assert file.count < 1500
    (long,) = plain_lines(file, 0, 1000, 500)
    assert (long.offset, long.error.code) == (0, "line_too_long")
    assert file.count < 3500
