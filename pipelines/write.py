"""A finished shard becomes one object, named after the shard alone, in one atomic put.

Its bad rows go to `errors/` first; the data part is the commit. Both puts may be repeated: the same shard
gives the same rows, so it does not matter which attempt comes last.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.rows import InputRow, Kind, RowError, carried_columns, output_schema
from pipelines.storage import Store
from pipelines.totals import Totals, totals_of

Format = Literal["parquet", "jsonl"]
_COUNTED = (
    "status",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "steps",
    "drafted_tokens",
    "accepted_tokens",
    "gpu_seconds",
    "cost_usd",
)


@dataclass(frozen=True, slots=True)
class OutputRow:
    """The columns of one answered or refused row, and what it carried along."""

    columns: Mapping[str, Any]
    carried: Mapping[str, Any]
    logprobs: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """A bad row as it came, with the reason."""

    row: InputRow
    file: str
    error: RowError

    def as_json(self) -> bytes:
        record = {
            "row_id": self.row.row_id,
            "custom_id": self.row.custom_id,
            "file": self.file,
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
class PartWriter:
    """Where the parts of a job go and what they look like."""

    store: Store
    format: Format
    carried: Mapping[str, Kind]

    def part_key(self, shard_id: str) -> str:
        return f"data/part-{shard_id}.{self.format}"

    def is_written(self, shard_id: str) -> bool:
        return self.store.exists(self.part_key(shard_id))

    def written_shards(self) -> frozenset[str]:
        """Ids of all shards that are written: the whole state of a job."""
        keys = (key.removeprefix("data/part-") for key in self.store.keys("data/part-"))
        return frozenset(key.removesuffix(f".{self.format}") for key in keys if key.endswith(self.format))

    def write(self, shard_id: str, rows: Sequence[OutputRow], errors: Sequence[ErrorRecord]) -> Totals:
        """Put the error records and then the part; the totals of its rows."""
        if errors:
            records = b"".join(error.as_json() for error in errors)
            self.store.put(f"errors/part-{shard_id}.jsonl", records)
        data = self._parquet(rows) if self.format == "parquet" else _jsonl(rows)
        self.store.put(self.part_key(shard_id), data)
        return totals_of(row.columns for row in rows)

    def read_totals(self, shard_id: str) -> Totals:
        """The totals of a written part."""
        return totals_of(self._records(shard_id, _COUNTED))

    def custom_ids(self, shard_id: str) -> Iterator[str]:
        """The custom_ids of a written part, where rows have one."""
        for record in self._records(shard_id, ("custom_id",)):
            if record["custom_id"] is not None:
                yield record["custom_id"]

    def _records(self, shard_id: str, columns: Sequence[str]) -> list[dict[str, Any]]:
        data = self.store.get(self.part_key(shard_id))
        if self.format == "jsonl":
            return [orjson.loads(line) for line in data.split(b"\n") if line]
        records: list[dict[str, Any]] = pq.read_table(io.BytesIO(data), columns=list(columns)).to_pylist()
        return records

    def _parquet(self, rows: Sequence[OutputRow]) -> bytes:
        schema = output_schema(self.carried)
        records = [{**row.columns, **carried_columns(_with_logprobs(row), self.carried)} for row in rows]
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(records, schema=schema), sink, compression="zstd")
        return sink.getvalue()


def _with_logprobs(row: OutputRow) -> dict[str, Any]:
    return {**row.carried, "logprobs": row.logprobs} if row.logprobs is not None else dict(row.carried)


def _jsonl(rows: Sequence[OutputRow]) -> bytes:
    """JSON lines; costs as numbers, which hold 12 decimals exactly up to a thousand dollars a row."""
    return b"".join(
        orjson.dumps(
            {**row.columns, "cost_usd": float(row.columns["cost_usd"]), **_with_logprobs(row)},
            option=orjson.OPT_APPEND_NEWLINE,
        )
        for row in rows
    )
