"""The cut of the input: every row in exactly one shard, the same in every run."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_engine.config import EngineConfig
from dflash_engine.request import SamplingParams
from pipelines.config import BatchConfig, ShardConfig
from pipelines.inputs import FileKind, Input, InputFile, find_input
from pipelines.shards import READ_TASKS, Piece, cut_rule, left_to_do, plan, read_tasks
from tests.pipelines.helpers import jsonl, parquet, prompts, read_shards


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(jsonl(prompts(57)))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(prompts(23))))
    (tmp_path / "c.jsonl.zst").write_bytes(pa.compress(jsonl(prompts(8)), "zstd", asbytes=True))
    (tmp_path / "d.parquet").write_bytes(parquet(prompts(31), group_rows=12))
    (tmp_path / "e.jsonl").write_bytes(b"\n\n")
    for number in range(4):
        (tmp_path / f"f{number}.jsonl").write_bytes(jsonl(prompts(number)))
        (tmp_path / f"g{number}.parquet").write_bytes(parquet(prompts(number), group_rows=2))
        (tmp_path / f"h{number}.jsonl.gz").write_bytes(gzip.compress(jsonl(prompts(number))))
    return tmp_path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), size=st.integers(1, 4000), limit=st.none() | st.integers(1, 150))
def test_every_row_is_in_exactly_one_shard(mixed: Path, rows: int, size: int, limit: int | None):
    shard = ShardConfig(rows=rows, bytes=size)
    shards = read_shards(mixed, shard, limit)
    ids = Counter(row.row_id for found in shards for row in found.rows)
    assert set(ids.values()) <= {1}
    assert len(ids) == min(57 + 23 + 8 + 31 + 3 * 6, limit or 1000)
    assert len({found.shard_id for found in shards}) == len(shards)
    assert all(1 <= len(found.rows) <= rows for found in shards)
    places = [(row.file, row.offset) for found in shards for row in found.rows]
    assert places == sorted(places)
    assert [found.shard_id for found in shards] == sorted(found.shard_id for found in shards)
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
    assert [[span.file.key for span in piece.spans] for piece in left if piece.compressed] == [
        ["b.jsonl.gz", "c.jsonl.zst"],
        ["h0.jsonl.gz", "h1.jsonl.gz", "h2.jsonl.gz", "h3.jsonl.gz"],
    ]
    # And ranges in which no line starts.
    assert read_shards(mixed, shard, done=frozenset(written)) == []


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
    groups = [{span.row_group for piece in task for span in piece.spans} for task in read_tasks(pieces)]
    assert groups == [{0}, {1}]
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "b.jsonl").write_bytes(jsonl(prompts(6000)))
    tasks = read_tasks(plan(find_input(str(tmp_path)), ShardConfig(rows=1)))
    assert len(tasks) <= READ_TASKS


def files(*sizes: int, kind: FileKind = FileKind.PLAIN, line_bytes: float = 100) -> Input:
    """An input that is nowhere: planning reads nothing."""
    return Input(None, tuple(InputFile(f"{n}", size, "", kind, line_bytes) for n, size in enumerate(sizes)))


def spans(piece: Piece) -> list[tuple[str, int, int | None]]:
    return [(span.file.key, span.start, span.stop) for span in piece.spans]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_hundreds_of_small_files_share_a_shard(tmp_path: Path, suffix: str):
    for number in range(300):
        rows = [{"prompt": f"{number} {line}"} for line in range(number % 3)]
        data = {"jsonl": jsonl, "parquet": parquet, "jsonl.gz": lambda rows: gzip.compress(jsonl(rows))}
        (tmp_path / f"{number:03d}.{suffix}").write_bytes(data[suffix](rows))
    (shard,) = read_shards(tmp_path, ShardConfig(rows=2000))
    contents = [f"{number} {line}" for number in range(300) for line in range(number % 3)]
    assert [row.request.messages[0].content for row in shard.rows] == contents
    assert [row.row_id for row in shard.rows[:3]] == [
        f"001.{suffix}:0",
        f"002.{suffix}:0",
        f"002.{suffix}:{1 if suffix == 'parquet' else 17}",
    ]
    assert len(read_shards(tmp_path, ShardConfig(rows=100))) < 20


def test_small_files_fill_shards_and_the_tail_of_them_is_cut_smaller():
    # 100 lines to a file, 1000 to a shard by its rows, of which a byte range is made for nine tenths.
    pieces = plan(files(*[10_000] * 100), ShardConfig(rows=1000))
    counts = [len(piece.spans) for piece in pieces]
    assert sum(counts) == 100
    assert counts == [9] * 8 + [7, 5, 4, 3, 2, 2, 2, 2, 1]


def test_the_rest_of_a_file_takes_the_small_ones_behind_it_along():
    pieces = plan(files(1050, 20, 30, 10_000), ShardConfig(bytes=500, rows=10_000))
    assert [spans(piece) for piece in pieces[:4]] == [
        [("0", 0, 500)],
        [("0", 500, 1000)],
        [("0", 1000, 1050), ("1", 0, 20), ("2", 0, 30)],
        [("3", 0, 500)],
    ]
    assert [piece.shard_id for piece in pieces[:4]] == [
        "00000-000000", "00000-000001", "00000-000002", "00003-000000",
    ]  # fmt: skip
    assert pieces[2].input_bytes == 100


def test_small_row_groups_share_a_shard_and_large_ones_are_cut(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(parquet(prompts(60), group_rows=3))
    (tmp_path / "b.parquet").write_bytes(parquet(prompts(60), group_rows=60))
    shards = read_shards(tmp_path, ShardConfig(rows=12))
    assert [len(shard.rows) for shard in shards[:9]] == [12] * 7 + [9, 7]
    assert all(len({row.file for row in shard.rows}) == 1 for shard in shards)


@pytest.mark.parametrize("limit", [1, 9, 10, 11, 19, 20, 25])
def test_a_limit_ends_compressed_files_by_their_rows(tmp_path: Path, limit: int):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"\n" + jsonl(prompts(10))))
    rows = [row for shard in read_shards(tmp_path, ShardConfig(rows=4), limit) for row in shard.rows]
    assert [row.custom_id for row in rows] == [f"c{number % 10}" for number in range(min(20, limit))]


def test_empty_files_make_no_shards(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "c.parquet").write_bytes(parquet([], pa.schema([("prompt", pa.string())])))
    (tmp_path / "d.jsonl.zst").write_bytes(b"")
    (tmp_path / "e.jsonl").write_bytes(b"\xef\xbb\xbf\r\n")
    assert read_shards(tmp_path, ShardConfig()) == []


def test_the_cut_knows_nothing_but_the_files_and_the_config():
    source = files(10**9, 5 * 10**9, 300, 17, 10**7, line_bytes=2000)
    first, again = plan(source, ShardConfig()), plan(source, ShardConfig())
    assert first == again
    assert sum(piece.input_bytes for piece in first) == 6 * 10**9 + 10**7 + 317


def job(**shard: float) -> BatchConfig:
    sampling = SamplingParams(max_tokens=shard.pop("max_tokens", None))
    engine = EngineConfig(model="fake", default_max_tokens=100)
    return BatchConfig(input="i", output="o", engine=engine, sampling=sampling, shard=ShardConfig(**shard))


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (job(rows=256), 256),
        (job(rows=256, tokens_per_s=10), 256),
        (job(rows=256, tokens_per_s=1000, max_lost_s=10), 100),
        (job(rows=256, tokens_per_s=1000, max_lost_s=10, max_tokens=500), 20),
        (job(rows=7, tokens_per_s=1000, max_lost_s=10), 7),
        (job(rows=7, tokens_per_s=1, max_lost_s=1), 1),
    ],
)
def test_a_lost_shard_costs_at_most_what_the_config_allows(config: BatchConfig, rows: int):
    assert cut_rule(config) == config.shard.model_copy(update={"rows": rows})


def test_lost_time_without_a_speed_is_refused():
    with pytest.raises(ValueError, match="max_lost_s needs tokens_per_s"):
        ShardConfig(max_lost_s=10)


def test_small_pieces_share_read_tasks_and_large_ones_do_not():
    small = read_tasks(plan(files(50_000_000), ShardConfig(rows=500)))
    assert {len(task) for task in small[:-1]} == {16}
    large = read_tasks(plan(files(10**9), ShardConfig(rows=10**6)))
    assert {len(task) for task in large[:200]} == {1}
    few = read_tasks(plan(files(5_000_000), ShardConfig(rows=1000)))
    assert {len(task) for task in few} == {1}
    huge = read_tasks(plan(files(10**11), ShardConfig(rows=10**6)))
    assert max(sum(piece.input_bytes for piece in task) for task in huge) <= 64 << 20
    compressed = read_tasks(plan(files(*[10**7] * 100, kind=FileKind.GZIP), ShardConfig()))
    assert {len(task) for task in compressed} == {1}
