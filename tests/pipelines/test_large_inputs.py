"""Inputs that are larger than what may be held of them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config import ShardConfig
from pipelines.inputs import find_input
from pipelines.rows import decode_rows, encode_rows
from pipelines.shards import plan
from tests.pipelines.helpers import jsonl, read_shards

SPARSE_BLOCK = 4 << 20
READ_IN_A_PROCESS = """
import json, re, sys
from dflash_engine.request import SamplingParams
from pipelines.config import ShardConfig
from pipelines.inputs import find_input
from pipelines.read import Reader
from pipelines.shards import plan, read_tasks

def peak_mb():
    # Of this program alone; getrusage knows the peak of the process that started it too.
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1]) / 1024

before = peak_mb()
source = find_input(sys.argv[1])
reader = Reader(source.store, ShardConfig(), SamplingParams())
good = bad = 0
for task in read_tasks(plan(source, ShardConfig())):
    for shard in reader.shards(task):
        shard.as_table()
        good += sum(row.error is None for row in shard.rows)
        bad += sum(row.error is not None for row in shard.rows)
print(json.dumps({"good": good, "bad": bad, "grown_mb": peak_mb() - before}))
"""


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_line_of_50_mb_is_a_row(tmp_path: Path, suffix: str):
    lines = [{"prompt": "first"}, {"prompt": "x" * 50_000_000}, {"prompt": "last"}]
    data = jsonl(lines)
    (tmp_path / f"a.{suffix}").write_bytes(gzip.compress(data, 1) if suffix.endswith("gz") else data)
    shards = read_shards(tmp_path, ShardConfig())
    rows = [row for shard in shards for row in decode_rows(encode_rows(shard.rows))]
    assert [row.request.messages[0].content for row in rows] == [line["prompt"] for line in lines]
    too_long = [
        row for shard in read_shards(tmp_path, ShardConfig(max_line_bytes=10**7)) for row in shard.rows
    ]
    assert [row.error and row.error.code for row in too_long] == [None, "line_too_long", None]
    assert [row.row_id for row in too_long] == [row.row_id for row in rows]
    assert len(too_long[1].raw) == 4096


def sparse_file(path: Path, blocks: int) -> None:
    """Blocks of ten rows and a hole, which reads as one line of zeros."""
    rows = jsonl([{"prompt": "x" * 300}] * 10)
    with path.open("wb") as file:
        for block in range(blocks):
            file.seek(block * SPARSE_BLOCK)
            file.write(rows)
            file.seek((block + 1) * SPARSE_BLOCK - 1)
            file.write(b"\n")


TEN_GB = pytest.param(2500, marks=[pytest.mark.full, pytest.mark.timeout(1800)], id="10 GB")


@pytest.mark.parametrize("blocks", [pytest.param(50, id="200 MB"), TEN_GB])
def test_a_file_of_any_size_is_planned_at_once_and_read_in_little_memory(tmp_path: Path, blocks: int):
    path = tmp_path / "a.jsonl"
    sparse_file(path, blocks)
    started = time.monotonic()
    pieces = plan(find_input(str(path)), ShardConfig())
    planned_s = time.monotonic() - started
    assert sum(piece.input_bytes for piece in pieces) == blocks * SPARSE_BLOCK
    assert planned_s < 1
    command = [sys.executable, "-c", READ_IN_A_PROCESS, str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[2])
    found = json.loads(done.stdout)
    print(f"planned in {planned_s:.3f} s, {len(pieces)} pieces; {found}")
    assert (found["good"], found["bad"]) == (10 * blocks, blocks)
    assert found["grown_mb"] < 100


def test_a_large_row_group_is_read_in_little_memory(tmp_path: Path):
    """Its columns are read in pieces, and its rows in batches."""
    table = pa.table({"prompt": [f"{number:07d}" * 200 for number in range(100_000)]})
    pq.write_table(
        table, tmp_path / "a.parquet", row_group_size=100_000, compression="none", use_dictionary=False
    )
    assert (tmp_path / "a.parquet").stat().st_size > 120e6
    command = [sys.executable, "-c", READ_IN_A_PROCESS, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[2])
    found = json.loads(done.stdout)
    assert (found["good"], found["bad"]) == (100_000, 0)
    assert found["grown_mb"] < 100
