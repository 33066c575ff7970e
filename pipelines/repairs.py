"""Lines of `errors/part-*.jsonl` that a user has edited, as the rows that they came from."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from pipelines.parse import RowParser, error_row
from pipelines.rows import BadRow, InputRow, RowError, type_name

INVALID = "invalid_repair"


@dataclass(frozen=True, slots=True)
class RepairedRow:
    """A row to be done again: its place in the first input, and the line that now counts for it."""

    row_id: str
    file: str
    offset: int
    raw: bytes

    def parse(self, parser: RowParser) -> InputRow:
        """The row as if `raw` stood at its place in the input; a blank line is an error here."""
        row = parser.line(self.raw, file=self.file, offset=self.offset)
        if row is None:
            return error_row(self.file, self.offset, self.raw, RowError("invalid_row", "the line is blank"))
        return row


def parse_repair(line: bytes) -> RepairedRow:
    """The row of one line of an errors file, in our own form or in that of `openai_output.error_line`.

    `raw` may be the line's text or, easier to edit, the JSON object itself; `raw_base64` holds bytes that are
    no text, and `raw` goes before it. Raises `BadRow` that says what is missing.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadRow(INVALID, f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadRow(INVALID, f"the line is {type_name(record)}, not an object")
    row_id, file, offset = (record.get(name) for name in ("row_id", "file", "offset"))
    if not isinstance(file, str) or type(offset) is not int or offset < 0 or row_id != f"{file}:{offset}":
        raise BadRow(INVALID, "row_id, file and offset do not name a row; keep them as they were")
    return RepairedRow(row_id, file, offset, _raw(record))


def _raw(record: Mapping[str, Any]) -> bytes:
    raw = record.get("raw")
    if isinstance(raw, dict):
        return orjson.dumps(raw)
    if isinstance(raw, str):
        return raw.encode()
    try:
        return base64.b64decode(record["raw_base64"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise BadRow(INVALID, "the line has no raw that is text or an object, and no raw_base64") from error
