"""Parquet rows as the JSON values that a line of JSONL would hold."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# Rows decoded at a time: enough to be fast, few enough that long conversations stay small in memory.
BATCH_ROWS = 256
# A column with missing integers comes out of data frames as floating point.
_INTEGERS = frozenset({"max_tokens", "top_k", "seed", "logprobs"})


def group_records(file: pq.ParquetFile, row_group: int) -> Iterator[dict[str, Any]]:
    """The rows of one row group, in order."""
    for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[row_group]):
        for record in batch.to_pylist(maps_as_pydicts="lossy"):
            yield {name: _json_value(value) for name, value in record.items()} | _integers(record)


def record_text(record: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON."""
    return orjson.dumps(record)


def _integers(record: Mapping[str, Any]) -> dict[str, int]:
    floats = {name: record[name] for name in _INTEGERS & record.keys() if isinstance(record[name], float)}
    return {name: int(value) for name, value in floats.items() if value.is_integer()}


def _json_value(value: Any) -> Any:
    """A value of an Arrow column as JSON has it; null fields of structs are fields that are not there."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _json_value(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
