"""The manifest counts what the parts hold, whoever wrote them."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipelines.config import BatchConfig, ShardConfig
from pipelines.generate import Generate
from pipelines.manifest import count_duplicates, read_manifest, write_manifest
from pipelines.storage import LocalStore
from pipelines.write import PartWriter
from tests.pipelines.helpers import jsonl, output_rows, read_shards
from tests.pipelines.test_generate import PRICES, spec

ROWS = [{"prompt": f"question {number}", "custom_id": f"c{number % 8}"} for number in range(20)] + [
    {"prompt": 4}
]


@pytest.fixture(params=["parquet", "jsonl"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> PartWriter:
    """Where 21 rows are written in several parts."""
    written = PartWriter(LocalStore(tmp_path / "out"), request.param, {})
    (tmp_path / "in.jsonl").write_bytes(jsonl(ROWS))

    async def write() -> None:
        actor = Generate(spec(tmp_path / "out", writer=written))
        for shard in read_shards(tmp_path / "in.jsonl", ShardConfig(rows=5)):
            await actor(shard.as_table().to_pylist()[0])

    asyncio.run(write())
    return written


def test_totals_parts_and_duplicates(writer: PartWriter, tmp_path: Path):
    config = BatchConfig(input="in", output=str(tmp_path / "out"), tags={"team": "x"})
    summary = write_manifest(writer, config, PRICES, 2.5)
    rows = output_rows(tmp_path / "out")
    assert (summary.totals.rows_ok, summary.totals.rows_error) == (20, 1)
    assert summary.totals.completion_tokens == sum(row["completion_tokens"] for row in rows)
    assert summary.totals.busy_ns == round(sum(row["gpu_seconds"] for row in rows) * 1e9)
    assert summary.totals.cost_usd == sum(Decimal(str(row["cost_usd"])) for row in rows)
    assert summary.duplicate_custom_ids == 12
    manifest: dict[str, Any] = orjson.loads((tmp_path / "out" / "_manifest.json").read_bytes())
    keys = [part["key"] for part in manifest["parts"]]
    assert keys == sorted(f"data/{path.name}" for path in (tmp_path / "out" / "data").iterdir())
    assert sum(part["rows_ok"] for part in manifest["parts"]) == 20
    assert (manifest["tags"], manifest["model"]) == ({"team": "x"}, "smollm2-135m")
    assert len(manifest["fingerprint"]) == 16


def test_a_manifest_that_is_there_stays_and_gives_the_same_summary(writer: PartWriter, tmp_path: Path):
    config = BatchConfig(input="in", output=str(tmp_path / "out"))
    assert read_manifest(writer.store) is None
    summary = write_manifest(writer, config, PRICES, 2.5)
    write_manifest(writer, config, PRICES, 99.0)
    assert read_manifest(writer.store).summary == summary


@pytest.mark.parametrize("max_hashes", [1, 7, 1000])
def test_duplicates_are_counted_alike_in_bounded_memory(writer: PartWriter, max_hashes: int):
    assert count_duplicates(writer, writer.parts(), len(ROWS), max_hashes) == 12
