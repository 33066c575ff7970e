"""A finished shard becomes one object, named after the shard alone, in one atomic put.

Its bad rows go to `errors/` first; the data part is the commit. Both puts may be repeated: the same shard
gives the same rows, so it does not matter which attempt comes last. Rows done again later make a part of the
next generation, `part-<shard>.g2`; the latest one counts.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pipelines.part_format import Carried, Columns, Format, PartFormat, part_format
from pipelines.rows import InputRow, Kind, RowError
from pipelines.storage import Store
from pipelines.totals import COUNTED, Totals, totals_of

_NAME = re.compile(r"part-([^.]+?)(?:\.g(\d+))?\.(?:parquet|jsonl)")


@dataclass(frozen=True, slots=True)
class Part:
    """One generation of a shard's rows."""

    shard_id: str
    generation: int = 1

    @property
    def name(self) -> str:
        return self.shard_id if self.generation == 1 else f"{self.shard_id}.g{self.generation}"

    @property
    def errors_key(self) -> str:
        return f"errors/part-{self.name}.jsonl"


@dataclass(frozen=True, slots=True)
class Rows:
    """Answered and refused rows on their way into a part."""

    columns: Columns
    carried: Carried


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """A bad row as it came, with the reason."""

    row: InputRow
    error: RowError

    def as_json(self) -> bytes:
        record = {
            "row_id": self.row.row_id,
            "custom_id": self.row.custom_id,
            "file": self.row.row_id.rpartition(":")[0],
            "offset": self.row.offset,
            "error_type": self.error.code,
            "error_message": self.error.message,
        }
        try:
            record["raw"] = self.row.raw.decode()
        except UnicodeDecodeError:
            record["raw_base64"] = base64.b64encode(self.row.raw).decode("ascii")
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True, slots=True)
class Base:
    """The generation that some rows of a part are done again on top of."""

    part: Part
    places: Sequence[int]
    """Which of its rows are replaced, in their order."""


@dataclass(frozen=True, slots=True)
class PartWriter:
    """Where the parts of a job go and what they look like."""

    store: Store
    format: Format
    carried: Mapping[str, Kind]

    def part_key(self, part: Part) -> str:
        return f"data/part-{part.name}.{self._extension}"

    def is_written(self, part: Part) -> bool:
        return self.store.exists(self.part_key(part))

    def parts(self) -> list[Part]:
        """The latest part of each shard that is written, in order: the whole state of a job."""
        latest: dict[str, Part] = {}
        for part in self.generations():
            if part.generation >= latest.get(part.shard_id, part).generation:
                latest[part.shard_id] = part
        return sorted(latest.values(), key=lambda part: part.shard_id)

    def generations(self) -> Iterator[Part]:
        """Every part that is written."""
        for key in self.store.keys("data/part-"):
            if key.endswith(self._extension) and (match := _NAME.fullmatch(key.removeprefix("data/"))):
                yield Part(match[1], int(match[2] or 1))

    def write(
        self, part: Part, rows: Rows, errors: Sequence[ErrorRecord], base: Base | None = None
    ) -> Totals:
        """Put the error records and then the part; the totals of `rows`.

        With a base, its other rows and their error records come along.
        """
        records = b"".join(error.as_json() for error in errors)
        data = self._format.encode(rows.columns, rows.carried)
        if base is not None:
            old = self.store.get(self.part_key(base.part))
            data = self._format.merge(old, data, base.places)
            records = self._errors_kept(base) + records
        if records:
            self.store.put(part.errors_key, records)
        elif self.store.exists(part.errors_key):
            # An attempt that died before its commit may have had errors where this one has none.
            self.store.delete(part.errors_key)
        self.store.put(self.part_key(part), data)
        return totals_of(rows.columns)

    def read_totals(self, part: Part) -> Totals:
        """The totals of a written part."""
        return totals_of(self.read_columns(part, COUNTED))

    def read_columns(self, part: Part, names: Sequence[str]) -> dict[str, list[Any]]:
        """A value of each of a written part's rows for each of these names."""
        return self._format.columns(self.store.get(self.part_key(part)), names)

    def read(self, part: Part, names: Sequence[str]) -> list[dict[str, Any]]:
        """These columns of a written part, row by row."""
        columns = self.read_columns(part, names)
        return [dict(zip(names, row, strict=True)) for row in zip(*map(columns.get, names), strict=True)]

    def custom_ids(self, part: Part) -> Iterator[str]:
        """The custom_ids of a written part, where rows have one."""
        for custom_id in self.read_columns(part, ("custom_id",))["custom_id"]:
            if custom_id is not None:
                yield custom_id

    def error_lines(self, part: Part) -> list[bytes]:
        """The error records of a part, as they stand in its file."""
        if not self.store.exists(part.errors_key):
            return []
        return [line + b"\n" for line in self.store.get(part.errors_key).split(b"\n") if line]

    @property
    def _extension(self) -> str:
        return "parquet" if self.format == "parquet" else "jsonl"

    @property
    def _format(self) -> PartFormat:
        return part_format(self.format, self.carried)

    def _errors_kept(self, base: Base) -> bytes:
        """The error records of the base's rows that are not done again."""
        rows = self.read(base.part, ("row_id",))
        replaced = {rows[place]["row_id"] for place in base.places}
        lines = self.error_lines(base.part)
        return b"".join(line for line in lines if orjson.loads(line)["row_id"] not in replaced)
