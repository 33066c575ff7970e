"""Edited lines of errors files are the rows that they came from."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from dflash_engine.request import Message, SamplingParams
from pipelines.parse import RowParser
from pipelines.repairs import parse_repair
from pipelines.rows import BadRow
from pipelines.write import ErrorRecord

PARSER = RowParser(SamplingParams())


def record_of(raw: bytes, file: str = "deep/in:1.jsonl", offset: int = 17) -> dict[str, Any]:
    """What a job writes about a bad line."""
    row = PARSER.line(raw, file=file, offset=offset)
    return orjson.loads(ErrorRecord(row, row.error).as_json())


def test_an_edited_line_is_its_row_with_the_same_place_and_name():
    record = record_of(b'{"prompt": 3, "custom_id": "c"}')
    repaired = parse_repair(
        orjson.dumps(record | {"raw": '{"prompt": "three", "custom_id": "c", "shop": 4}'})
    )
    row = repaired.parse(PARSER)
    assert (row.row_id, row.file, row.offset) == ("deep/in:1.jsonl:17", "deep/in:1.jsonl", 17)
    assert (row.custom_id, row.error, row.carried) == ("c", None, {"shop": 4})
    assert row.request.messages == (Message("user", "three"),)


def test_the_line_may_be_given_as_an_object():
    record = record_of(b"{")
    row = parse_repair(orjson.dumps(record | {"raw": {"prompt": "now"}})).parse(PARSER)
    assert (row.row_id, row.request.messages) == ("deep/in:1.jsonl:17", (Message("user", "now"),))


def test_bytes_that_are_no_text_come_back_and_text_goes_before_them():
    raw = b'{"prompt": "\xff"}'
    record = record_of(raw)
    assert "raw" not in record
    assert parse_repair(orjson.dumps(record)).parse(PARSER) == PARSER.line(
        raw, file="deep/in:1.jsonl", offset=17
    )
    assert parse_repair(orjson.dumps(record | {"raw": "x"})).raw == b"x"


@pytest.mark.parametrize("raw", [b'{"prompt": ""}', b'\xef\xbb\xbf{"prompt": 3}', b"[]\r"])
def test_a_line_that_was_not_edited_is_the_same_bad_row(raw: bytes):
    first = PARSER.line(raw, file="f", offset=0)
    assert parse_repair(orjson.dumps(record_of(raw, "f", 0))).parse(PARSER) == first


def test_a_line_that_was_emptied_stays_a_bad_row():
    row = parse_repair(orjson.dumps(record_of(b"{") | {"raw": " "})).parse(PARSER)
    assert (row.row_id, row.error.code) == ("deep/in:1.jsonl:17", "invalid_row")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a', "not JSON"),
        (b"[1]", "is a list, not an object"),
        (b'{"prompt": "a fresh row"}', "do not name a row"),
        ({"row_id": "f:1", "file": "f", "offset": 2, "raw": ""}, "do not name a row"),
        ({"row_id": "f:1", "file": "g", "offset": 1, "raw": ""}, "do not name a row"),
        ({"row_id": "f:-1", "file": "f", "offset": -1, "raw": ""}, "do not name a row"),
        ({"row_id": "f:True", "file": "f", "offset": True, "raw": ""}, "do not name a row"),
        ({"row_id": "f:1", "file": "f", "offset": 1}, "has no raw"),
        ({"row_id": "f:1", "file": "f", "offset": 1, "raw": 3}, "has no raw"),
        ({"row_id": "f:1", "file": "f", "offset": 1, "raw_base64": "*"}, "has no raw"),
    ],
)
def test_what_is_no_line_of_an_errors_file_is_named(line: bytes | dict, reason: str):
    with pytest.raises(BadRow, match=reason) as raised:
        parse_repair(orjson.dumps(line) if isinstance(line, dict) else line)
    assert raised.value.error.code == "invalid_repair"


def test_base64_without_an_edit_keeps_every_byte():
    every = bytes(range(256))
    record = {"row_id": "f:1", "file": "f", "offset": 1, "raw_base64": base64.b64encode(every).decode()}
    assert parse_repair(orjson.dumps(record)).raw == every
