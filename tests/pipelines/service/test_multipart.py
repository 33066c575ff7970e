"""Forms as they arrive, in pieces of any size, held against how a client's library writes them."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.service.errors import ApiError
from pipelines.service.multipart import (
    Form,
    PartBegin,
    PartData,
    boundary_of,
)

# Contents that look like the beginning of a boundary are the hard ones.
SNIPPETS = [b"\r", b"\n", b"-", b"\r\n--", b"\r\n--b", b"--b--", b"x", b"\x00"]
hard = st.lists(st.sampled_from(SNIPPETS)).map(b"".join)


def read(body: bytes, cuts: list[int], boundary: bytes) -> list[tuple[str, str | None, bytes]]:
    """The parts of a body that comes in pieces of these sizes, over and over."""
    parser = Form(boundary)
    parts: list[Any] = []
    start = number = 0
    while start < len(body):
        size = cuts[number % len(cuts)]
        for event in parser.feed(body[start : start + size]):
            if isinstance(event, PartBegin):
                parts.append([event.name, event.filename, b""])
            elif isinstance(event, PartData):
                parts[-1][2] += event.data
        start, number = start + size, number + 1
    parser.close()
    return [tuple(part) for part in parts]


@settings(deadline=None)
@given(content=hard | st.binary(max_size=300), cuts=st.lists(st.integers(1, 40), min_size=1))
def test_what_a_client_writes_is_read_back_however_it_is_cut(content: bytes, cuts: list[int]):
    request = httpx2.Request(
        "POST", "http://x", data={"purpose": "batch"}, files={"file": ("ä b.jsonl", content)}
    )
    body = request.read()
    boundary = boundary_of(request.headers["content-type"])
    assert read(body, cuts, boundary) == [("purpose", None, b"batch"), ("file", "ä b.jsonl", content)]


@settings(deadline=None)
@given(contents=st.lists(hard.filter(lambda data: b"\r\n--b" not in data)), cut=st.integers(1, 9))
def test_a_short_boundary_is_told_from_what_only_begins_like_one(contents: list[bytes], cut: int):
    head = b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\n'
    body = b"\r\n".join([*(head + content for content in contents), b"--b--\r\n"])
    assert read(body, [cut], b"b") == [("f", None, content) for content in contents]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "ends before"),
        (b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nhalf', "ends before"),
        (b"--b\r\nContent-Type: text/plain\r\n\r\nx\r\n--b--", "without Content-Disposition"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--", "without a name"),
        (b"--b\r\n\r\nx\r\n--b--", "without Content-Disposition"),
        (b"x" * 100, "boundary"),
        (b"--b\r\nX: " + b"y" * 100_000, "header size"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, said: str):
    with pytest.raises(ApiError, match=said) as refusal:
        read(body, [7], b"b")
    assert refusal.value.status == 400


@pytest.mark.parametrize("value", ["", "application/json", "multipart/form-data", "text/plain; boundary=b"])
def test_a_content_type_that_is_no_form_is_refused(value: str):
    with pytest.raises(ApiError, match="multipart/form-data"):
        boundary_of(value)
