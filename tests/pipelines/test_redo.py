"""Rows that failed are done again on top of what is written, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from dflash_engine.config import EngineConfig
from pipelines.config import BatchConfig
from pipelines.errors import JobRefused
from pipelines.inputs import find_input
from pipelines.manifest import clean_up, read_manifest, write_manifest
from pipelines.redo import Repairs, holds_repairs, plan_redos, read_repairs
from pipelines.storage import LocalStore
from pipelines.storage_config import StorageConfig
from pipelines.write import Part, PartWriter
from tests.pipelines.helpers import jsonl
from tests.pipelines.test_generate import PRICES, generated, shards_of, spec

LONG = "far too long a prompt for it"
ROWS: list[dict[str, Any]] = [
    {"prompt": f"question {number}", "custom_id": f"c{number}"} for number in range(30)
]
ROWS[3] = {"prompt": 3, "custom_id": "c3"}
ROWS[4] = {"prompt": LONG, "custom_id": "c4"}
ROWS[20] = {"prompt": LONG, "custom_id": "c20"}
SMALL = EngineConfig(model="fake", default_max_tokens=10, max_model_len=6)
LARGE = EngineConfig(model="fake", default_max_tokens=10, max_model_len=60)


@pytest.fixture(params=["parquet", "jsonl"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> PartWriter:
    return PartWriter(LocalStore(tmp_path / "out"), request.param, {})


@pytest.fixture
def shards(tmp_path: Path, writer: PartWriter) -> list[dict[str, Any]]:
    """Shards that are written, with three errors in two of them."""
    found = shards_of(tmp_path, ROWS, size=10)
    generated(spec(tmp_path, writer=writer, engine=SMALL), found)
    assert sum(writer.read_totals(part).rows_error for part in writer.parts()) == 3
    return found


def redo(
    tmp_path: Path, writer: PartWriter, shards: list[dict[str, Any]], lines: list[dict] | None, retry: bool
) -> None:
    """Do again what is to be done, with an engine that takes long prompts."""
    repairs = Repairs({})
    if lines is not None:
        (tmp_path / "fixed.jsonl").write_bytes(jsonl(lines))
        repairs = read_repairs(str(tmp_path / "fixed.jsonl"), StorageConfig())
    redos = plan_redos(writer, writer.parts(), repairs, retry_errors=retry)
    again = [shard for shard in shards if shard["shard_id"] in redos]
    receipts = generated(spec(tmp_path, writer=writer, engine=LARGE, redos=redos), again)
    assert [receipt.failure for receipt in receipts] == [None] * len(again)


def rows_of(writer: PartWriter) -> list[dict[str, Any]]:
    columns = ("row_id", "custom_id", "status", "text", "completion_tokens")
    return [row for part in writer.parts() for row in writer.read(part, columns)]


def errors_of(writer: PartWriter) -> list[dict[str, Any]]:
    return [orjson.loads(line) for part in writer.parts() for line in writer.error_lines(part)]


def test_rows_that_failed_are_tried_again_and_the_others_stay_as_they_were(
    tmp_path: Path, writer: PartWriter, shards: list[dict[str, Any]]
):
    before = rows_of(writer)
    redo(tmp_path, writer, shards, None, retry=True)
    after = rows_of(writer)
    assert [row["row_id"] for row in after] == [row["row_id"] for row in before]
    assert [row["custom_id"] for row in after if row["status"] == "error"] == ["c3"]
    changed = [new["custom_id"] for old, new in zip(before, after, strict=True) if old != new]
    assert changed == ["c4", "c20"]
    assert [record["custom_id"] for record in errors_of(writer)] == ["c3"]
    assert {part.generation for part in writer.parts()} == {1, 2}


def test_lines_that_were_put_right_fill_their_gaps_and_no_others(
    tmp_path: Path, writer: PartWriter, shards: list[dict[str, Any]]
):
    lines = errors_of(writer)
    assert [line["custom_id"] for line in lines] == ["c3", "c4", "c20"]
    lines[0]["raw"] = {"prompt": "now a text", "custom_id": "c3"}
    before = rows_of(writer)
    redo(tmp_path, writer, shards, lines[:1], retry=False)
    after = rows_of(writer)
    assert [new["custom_id"] for old, new in zip(before, after, strict=True) if old != new] == ["c3"]
    assert [record["custom_id"] for record in errors_of(writer)] == ["c4", "c20"]
    # The same answer as that of the prompt at its place in an input.
    good = tmp_path / "good"
    rows = [*ROWS[:3], {"prompt": "now a text", "custom_id": "c3"}]
    elsewhere = PartWriter(LocalStore(good), "parquet", {})
    generated(spec(good, writer=elsewhere, engine=LARGE), shards_of(tmp_path, rows))
    assert rows_of(elsewhere)[3]["text"] == after[3]["text"]


def test_a_line_that_is_still_wrong_stays_an_error_with_its_new_text(
    tmp_path: Path, writer: PartWriter, shards: list[dict[str, Any]]
):
    lines = errors_of(writer)
    lines[0]["raw"] = '{"prompt": 4}'
    redo(tmp_path, writer, shards, lines[:1], retry=False)
    assert [record["raw"] for record in errors_of(writer) if record["error_type"] == "invalid_prompt"] == [
        '{"prompt": 4}'
    ]


def test_the_latest_generation_counts_and_older_ones_go_once_the_manifest_says_so(
    tmp_path: Path, writer: PartWriter, shards: list[dict[str, Any]]
):
    config = BatchConfig(input="in", output=writer.store.uri, format=writer.format)
    first = write_manifest(writer, config, PRICES, 1.0)
    redo(tmp_path, writer, shards, None, retry=True)
    before = read_manifest(writer.store)
    assert (first.totals.rows_error, before.holds(writer), before.outdated(writer)) == (3, False, False)
    second = write_manifest(writer, config, PRICES, 1.0, before.etag)
    after = read_manifest(writer.store)
    assert (second.totals.rows_error, after.holds(writer), after.outdated(writer)) == (1, True, True)
    assert second.totals.rows == first.totals.rows == 30
    clean_up(writer)
    assert not after.outdated(writer)
    assert sorted(writer.store.keys("data/")) == sorted(after.keys)
    assert len(list(writer.store.keys("errors/"))) == 1


def test_a_stale_error_file_of_an_attempt_that_died_does_not_count(tmp_path: Path, writer: PartWriter):
    writer.store.put(Part("00000-000000").errors_key, b'{"row_id": "in.jsonl:0"}\n')
    generated(spec(tmp_path, writer=writer), shards_of(tmp_path, [{"prompt": "fine"}]))
    assert plan_redos(writer, writer.parts(), Repairs({}), retry_errors=True) == {}


def test_repairs_are_told_from_prompts_and_a_bad_line_is_named(tmp_path: Path):
    record = {"row_id": "in.jsonl:7", "file": "in.jsonl", "offset": 7, "raw": "x", "error_type": "e"}
    (tmp_path / "fixed.jsonl").write_bytes(b"\n" + jsonl([record, {"raw": "x"}]))
    (tmp_path / "in.jsonl").write_bytes(jsonl(ROWS))
    assert holds_repairs(find_input(str(tmp_path / "fixed.jsonl")))
    assert not holds_repairs(find_input(str(tmp_path / "in.jsonl")))
    with pytest.raises(
        JobRefused, match=r"fixed\.jsonl, byte \d+\): row_id, file and offset do not name a row"
    ):
        read_repairs(str(tmp_path / "fixed.jsonl"), StorageConfig())
