"""The cut of the input: every row in exactly one shard, the same in every run."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.config import ShardConfig
from pipelines.inputs import find_input
from pipelines.shards import MAX_READ_TASKS, left_to_do, plan, read_tasks
from tests.pipelines.helpers import jsonl, parquet, prompts, read_shards


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(jsonl(prompts(57)))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(prompts(23))))
    (tmp_path / "c.jsonl.zst").write_bytes(pa.compress(jsonl(prompts(8)), "zstd", asbytes=True))
    (tmp_path / "d.parquet").write_bytes(parquet(prompts(31), group_rows=12))
    (tmp_path / "e.jsonl").write_bytes(b"\n\n")
    return tmp_path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), size=st.integers(1, 4000), limit=st.none() | st.integers(1, 130))
def test_every_row_is_in_exactly_one_shard(mixed: Path, rows: int, size: int, limit: int | None):
    shard = ShardConfig(rows=rows, bytes=size)
    shards = read_shards(mixed, shard, limit)
    ids = Counter(row.row_id for found in shards for row in found.rows)
    assert set(ids.values()) <= {1}
    assert len(ids) == min(57 + 23 + 8 + 31, limit or 1000)
    assert len({found.shard_id for found in shards}) == len(shards)
    assert all(1 <= len(found.rows) <= rows for found in shards)
    again = read_shards(mixed, shard, limit)
    assert [(one.shard_id, one.rows) for one in again] == [(one.shard_id, one.rows) for one in shards]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(done=st.sets(st.integers(0, 200)), rows=st.integers(1, 20))
def test_a_rerun_reads_what_is_not_done_and_nothing_else(mixed: Path, done: set[int], rows: int):
    shard = ShardConfig(rows=rows)
    every = read_shards(mixed, shard)
    written = frozenset(found.shard_id for number, found in enumerate(every) if number in done)
    left = read_shards(mixed, shard, done=written)
    assert [found.shard_id for found in left] == [
        one.shard_id for one in every if one.shard_id not in written
    ]


def test_a_whole_output_leaves_only_compressed_files_to_look_at(mixed: Path):
    shard = ShardConfig(rows=5)
    written = {found.shard_id for found in read_shards(mixed, shard)}
    left = left_to_do(plan(find_input(str(mixed)), shard), written)
    assert [piece.file.key for piece in left if piece.compressed] == ["b.jsonl.gz", "c.jsonl.zst"]
    assert [piece.file.key for piece in left if not piece.compressed] == ["e.jsonl"] * 2


def test_ranges_with_more_rows_than_a_shard_are_split_evenly_and_resumed_by_their_parts(tmp_path: Path):
    # Long lines first: the sample makes ranges that hold many of the short ones behind.
    rows = [{"prompt": "x" * 4000} for _ in range(80)] + [{"prompt": "y"} for _ in range(400)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    shard = ShardConfig(rows=10)
    shards = read_shards(tmp_path, shard)
    parts = [found for found in shards if "of" in found.shard_id]
    assert parts
    assert all(len(found.rows) <= 10 for found in shards)
    written = frozenset(found.shard_id for found in shards) - {parts[-1].shard_id}
    assert [found.shard_id for found in read_shards(tmp_path, shard, done=written)] == [parts[-1].shard_id]


def test_the_tail_of_the_input_is_cut_smaller(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"prompt": "x" * 90}] * 1000))
    sizes = [piece.input_bytes for piece in plan(find_input(str(tmp_path)), ShardConfig(rows=100))]
    assert sum(sizes) == (tmp_path / "a.jsonl").stat().st_size
    assert sizes[0] == sizes[1] == max(sizes)
    # But for the last rest, never under a quarter, and falling.
    assert min(sizes[:-1]) >= max(sizes) // 4
    assert sizes == sorted(sizes, reverse=True)
    assert sum(size < max(sizes) / 2 for size in sizes) >= 3


def test_bytes_bound_a_shard_where_rows_do_not(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"prompt": "x" * 990}] * 100))
    shards = read_shards(tmp_path, ShardConfig(rows=1000, bytes=5000))
    assert all(sum(len(row.raw) + 1 for row in found.rows) <= 6010 for found in shards)
    assert len(shards) > 15


def test_slices_of_a_row_group_share_a_read_task_and_tasks_are_bounded(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(parquet(prompts(40), group_rows=20))
    pieces = plan(find_input(str(tmp_path)), ShardConfig(rows=3))
    assert [{piece.row_group for piece in task} for task in read_tasks(pieces)] == [{0}, {1}]
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "b.jsonl").write_bytes(jsonl(prompts(6000)))
    tasks = read_tasks(plan(find_input(str(tmp_path)), ShardConfig(rows=1)))
    assert len(tasks) <= MAX_READ_TASKS
