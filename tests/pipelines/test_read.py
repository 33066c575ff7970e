"""Bytes to shards of rows: files of all kinds together, and broken ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from dflash_engine.request import Message, SamplingParams
from pipelines.config import ShardConfig
from pipelines.inputs import find_input
from pipelines.read import sample_rows
from pipelines.rows import decode_rows, encode_rows
from tests.pipelines.helpers import jsonl, parquet, prompts, read_rows, read_shards

TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
MESSAGES = (Message("system", "s"), Message("user", "hi"))


def test_files_and_rows_of_all_schemas_stand_side_by_side(tmp_path: Path):
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": TURNS}}
    texts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    (tmp_path / "a.jsonl").write_bytes(
        jsonl(
            [{"prompt": "hi", "x": 1}, {"messages": TURNS, "x": "one"}, chat, {"messages": texts, "x": [1]}]
        )
    )
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl([{"prompt": "hi", "x": None, "y": {"z": 1}}])))
    (tmp_path / "c.parquet").write_bytes(parquet([{"messages": orjson.dumps(TURNS).decode(), "x": 1.5}]))
    (tmp_path / "d.parquet").write_bytes(parquet([{"prompt": "hi", "y": True}]))
    hi = (Message("user", "hi"),)
    rows = read_rows(tmp_path)
    assert [row.request.messages for row in rows] == [hi, MESSAGES, MESSAGES, hi, hi, MESSAGES, hi]
    assert [row.carried.get("x") for row in rows] == [1, "one", None, [1], None, 1.5, None]
    assert decode_rows(encode_rows(rows)) == rows


def test_crlf_and_a_bom_belong_to_no_row(tmp_path: Path):
    lines = b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two"}\r\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    rows = read_rows(tmp_path)
    assert [row.request.messages[0].content for row in rows] == ["one", "two"] * 2
    assert [row.row_id for row in rows] == ["a.jsonl:0", "a.jsonl:24", "b.jsonl.gz:0", "b.jsonl.gz:24"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_breaks_off_costs_one_row_and_the_next_file_is_read(tmp_path: Path, suffix: str):
    data = jsonl([{"prompt": f"{number} {number * 7919}"} for number in range(20_000)])
    packed = gzip.compress(data) if suffix == "gz" else pa.compress(data, "zstd", asbytes=True)
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(packed[:-100])
    (tmp_path / f"b.jsonl.{suffix}").write_bytes(packed)
    shards = read_shards(tmp_path, ShardConfig())
    assert read_shards(tmp_path, ShardConfig()) == shards
    rows = [row for shard in shards for row in shard.rows]
    bad = [row for row in rows if row.error is not None]
    assert [(row.file, row.error.code) for row in bad] == [(f"a.jsonl.{suffix}", "unreadable_input")]
    assert len([row for row in rows if row.file.startswith("b")]) == 20_000
    kept = rows.index(bad[0])
    assert kept > 2_000
    assert b"".join(row.raw + b"\n" for row in rows[:kept]) == data[: bad[0].offset]
    assert sum(shard.input_bytes for shard in shards) == 2 * len(packed) - 100


def test_compressed_shards_that_are_done_are_not_parsed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(prompts(100))))
    shards = read_shards(tmp_path, ShardConfig(rows=10))
    parsed: list[bytes] = []

    def spy(raw: bytes) -> object:
        parsed.append(raw)
        return json.loads(raw)

    monkeypatch.setattr("orjson.loads", spy)
    (last,) = read_shards(
        tmp_path, ShardConfig(rows=10), done=frozenset(shard.shard_id for shard in shards[:-1])
    )
    assert last == shards[-1]
    assert parsed == [row.raw for row in last.rows]


def test_rows_survive_the_trip_to_an_actor(tmp_path: Path):
    lines = [
        {
            "messages": TURNS,
            "temperature": 0.5,
            "stop": ["a"],
            "logit_bias": {"3": -1},
            "shop": {"x": [1, None]},
        },
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2]}},
        {"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {"prompt": "raw"}},
        {"prompt": 3, "custom_id": "bad"},
    ]
    (tmp_path / "a.jsonl").write_bytes(jsonl(lines) + b"\xff\xfe\n")
    rows = read_rows(tmp_path)
    assert len(rows) == 5
    assert decode_rows(encode_rows(rows)) == rows
    assert decode_rows(encode_rows([])) == []


def test_the_sample_has_rows_of_every_kind_of_file(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(parquet([{"prompt": "a", "x": 1}] * 3))
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"prompt": "a", "y": 1}]))
    sampled = list(sample_rows(find_input(str(tmp_path)), SamplingParams()))
    assert [dict(row.carried) for row in sampled] == [{"x": 1}] * 3 + [{"y": 1}]


def test_the_sample_comes_from_all_over_the_input(tmp_path: Path):
    for number in range(100):
        (tmp_path / f"{number:02d}.jsonl").write_bytes(jsonl([{"prompt": "a", "part": number}]))
    sampled = [row.carried["part"] for row in sample_rows(find_input(str(tmp_path)), SamplingParams())]
    assert sampled == list(range(0, 100, 7))
