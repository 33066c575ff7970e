"""A part's bytes: columns of rows to Parquet or JSON lines, and back to records."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.openai_output import OpenAIPart
from pipelines.rows import RESULT_FIELDS, Kind, carried_columns, output_schema

Format = Literal["parquet", "jsonl", "openai"]
Columns = Mapping[str, Sequence[Any]]
"""A value of each row for each of `rows.RESULT_FIELDS`."""
Carried = Sequence[Mapping[str, Any]]
"""What each row carries along, log probabilities included."""


class PartFormat(Protocol):
    """How the parts of a job are written."""

    def encode(self, columns: Columns, carried: Carried) -> bytes: ...
    def merge(self, old: bytes, new: bytes, places: Sequence[int]) -> bytes:
        """The old part with its rows at `places` replaced by those of the new one, in order."""
        ...

    def columns(self, data: bytes, names: Sequence[str]) -> dict[str, list[Any]]:
        """A value of each row for each of these names."""
        ...


class ParquetPart:
    """All parts of a job have the columns of `rows.output_schema`."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = kinds
        self._schema = output_schema(kinds)

    def encode(self, columns: Columns, carried: Carried) -> bytes:
        laid = [carried_columns(values, self._kinds) for values in carried]
        names = self._schema.names[len(RESULT_FIELDS) :]
        values = {**columns, **{name: [row.get(name) for row in laid] for name in names}}
        arrays = [pa.array(values[column.name], column.type) for column in self._schema]
        return _parquet(pa.Table.from_arrays(arrays, schema=self._schema))

    def merge(self, old: bytes, new: bytes, places: Sequence[int]) -> bytes:
        before, after = (pq.read_table(io.BytesIO(data)) for data in (old, new))
        order = list(range(before.num_rows))
        for number, place in enumerate(places):
            order[place] = before.num_rows + number
        return _parquet(pa.concat_tables([before, after]).take(order))

    def columns(self, data: bytes, names: Sequence[str]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = pq.read_table(io.BytesIO(data), columns=list(names)).to_pydict()
        return columns


class JsonlPart:
    """Rows as JSON objects, carried values as they came.

    Costs are numbers, which hold 12 decimals exactly up to a thousand dollars a row.
    """

    def encode(self, columns: Columns, carried: Carried) -> bytes:
        values = {**columns, "cost_usd": [float(cost) for cost in columns["cost_usd"]]}
        names = [field.name for field in RESULT_FIELDS]
        rows = zip(*(values[name] for name in names), strict=True)
        return b"".join(
            orjson.dumps({**dict(zip(names, row, strict=True)), **extra}, option=orjson.OPT_APPEND_NEWLINE)
            for row, extra in zip(rows, carried, strict=True)
        )

    def merge(self, old: bytes, new: bytes, places: Sequence[int]) -> bytes:
        lines = _lines(old)
        for place, line in zip(places, _lines(new), strict=True):
            lines[place] = line
        return b"".join(line + b"\n" for line in lines)

    def columns(self, data: bytes, names: Sequence[str]) -> dict[str, list[Any]]:
        records = [orjson.loads(line) for line in _lines(data)]
        return {name: [record[name] for record in records] for name in names}


def part_format(name: Format, kinds: Mapping[str, Kind]) -> PartFormat:
    """The format of a name, for carried columns of these kinds."""
    if name == "openai":
        return OpenAIPart()
    return ParquetPart(kinds) if name == "parquet" else JsonlPart()


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _lines(data: bytes) -> list[bytes]:
    return [line for line in data.split(b"\n") if line]
