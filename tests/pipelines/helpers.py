"""Small pieces that several pipeline tests use."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_engine.request import SamplingParams
from pipelines.config import ShardConfig
from pipelines.inputs import apply_limit, find_input
from pipelines.read import Reader, ShardRows
from pipelines.rows import InputRow
from pipelines.shards import left_to_do, plan, read_tasks


def jsonl(rows: list[Any]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def prompts(count: int) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"c{number}", "prompt": f"question number {number} " + "x" * (number % 7)}
        for number in range(count)
    ]


def parquet(rows: list[dict[str, Any]], schema: pa.Schema | None = None, group_rows: int = 1000) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, row_group_size=group_rows)
    return sink.getvalue()


def read_shards(
    uri: Path, shard: ShardConfig, limit: int | None = None, done: frozenset[str] = frozenset()
) -> list[ShardRows]:
    """Every shard of an input that is not done, read without Ray."""
    source = apply_limit(find_input(str(uri)), limit)
    reader = Reader(source.store, shard, SamplingParams(), done)
    pieces = left_to_do(plan(source, shard), done)
    return [found for task in read_tasks(pieces) for found in reader.shards(task)]


def read_rows(uri: Path) -> list[InputRow]:
    """Every row of an input, read without Ray."""
    return [row for shard in read_shards(uri, ShardConfig()) for row in shard.rows]


def output_rows(output: Path) -> list[dict[str, Any]]:
    """All rows of a job's parts, in the order of the parts."""
    rows: list[dict[str, Any]] = []
    for part in sorted((output / "data").glob("part-*.parquet")):
        rows += pq.read_table(part).to_pylist()
    for part in sorted((output / "data").glob("part-*.jsonl")):
        rows += [orjson.loads(line) for line in part.read_bytes().split(b"\n") if line]
    return rows


def error_records(output: Path) -> list[dict[str, Any]]:
    """All records of a job's error files."""
    parts = sorted((output / "errors").glob("part-*.jsonl"))
    return [orjson.loads(line) for part in parts for line in part.read_bytes().split(b"\n") if line]
