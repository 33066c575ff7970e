"""What a batch's input file has to be, and what is said of one that is not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from pipelines.service.batch_lines import MAX_ERRORS, check_lines
from tests.pipelines.service.batch_world import CHAT, TEXT, chat_line

GOOD = orjson.dumps(chat_line("good", "hi"))


def check(*lines: bytes, most: int = 100):
    return check_lines(lines, CHAT, most, lambda name: name == "fake")


def line(**changes) -> bytes:
    values: dict[str, Any] = {**chat_line("a", "hi"), **changes}
    return orjson.dumps({name: value for name, value in values.items() if value is not None})


def test_good_lines_are_counted_and_blank_ones_are_not():
    checked = check(b"\xef\xbb\xbf" + GOOD, b"", line(), b" \r", line(custom_id="b") + b"\r")
    assert (checked.num_requests, checked.errors) == (3, ())


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"not JSON", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (line(custom_id=None), "missing_required_parameter", "custom_id"),
        (line(custom_id=7), "invalid_custom_id", "custom_id"),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="good"), "duplicate_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(method=None), "missing_required_parameter", "method"),
        (line(url=TEXT), "invalid_url", "url"),
        (line(url={}), "invalid_url", "url"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(body="{}"), "invalid_body", "body"),
        (line(body={}), "missing_required_parameter", "body.model"),
        (line(body={"model": "gpt"}), "model_not_found", "body.model"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(raw: bytes, code: str, param: str | None):
    checked = check(GOOD, b"", raw, line(custom_id="z"))
    (error,) = checked.errors
    assert (error.line, error.code, error.param) == (3, code, param)


def test_a_repeated_custom_id_is_told_where_it_was_first():
    checked = check(line(), GOOD, line())
    assert checked.errors[0].message == "custom_id 'a' is in line 1 too"


def test_a_file_without_requests_or_with_too_many_is_refused():
    assert [error.code for error in check(b"", b"  ").errors] == ["empty_file"]
    lines = [line(custom_id=str(number)) for number in range(4)]
    assert check(*lines, most=4).errors == ()
    (error,) = check(*lines, most=3).errors
    assert (error.code, error.line) == ("too_many_requests", 4)


def test_only_so_many_errors_are_listed():
    assert len(check(*[b"{"] * (MAX_ERRORS + 10), most=1000).errors) == MAX_ERRORS
