"""Rows of Parquet files mean the same as lines of JSONL."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from dflash_engine.request import Message, SamplingParams
from pipelines.config import ShardConfig
from pipelines.inputs import find_input
from pipelines.read import sample_rows
from pipelines.rows import InputRow, decode_rows, encode_rows
from tests.pipelines.helpers import jsonl, parquet, read_shards

TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
MESSAGES = (Message("system", "s"), Message("user", "hi"))


def rows_of(path: Path) -> list[InputRow]:
    return [row for shard in read_shards(path, ShardConfig()) for row in shard.rows]


def test_messages_may_be_structs_or_json_text(tmp_path: Path):
    struct = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
    (tmp_path / "a.parquet").write_bytes(parquet([{"messages": TURNS}], pa.schema([("messages", struct)])))
    (tmp_path / "b.parquet").write_bytes(parquet([{"messages": orjson.dumps(TURNS).decode()}]))
    (tmp_path / "c.jsonl").write_bytes(jsonl([{"messages": TURNS}]))
    rows = rows_of(tmp_path)
    assert [row.request.messages for row in rows] == [MESSAGES] * 3
    assert [row.row_id for row in rows] == ["a.parquet:0", "b.parquet:0", "c.jsonl:0"]


def test_a_batch_body_may_be_a_struct_with_empty_fields(tmp_path: Path):
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
    rows = [
        {**line, "body": {"messages": TURNS, "max_tokens": 3}},
        {**line, "body": {"messages": TURNS, "top_p": 0.5}},
    ]
    (tmp_path / "a.parquet").write_bytes(parquet(rows, pa.Table.from_pylist(rows).schema))
    first, second = rows_of(tmp_path)
    assert first.request.sampling == SamplingParams(max_tokens=3)
    assert second.request.sampling == SamplingParams(top_p=0.5)


def test_whole_numbers_in_floating_columns_are_integers_where_integers_are_wanted(tmp_path: Path):
    rows = [
        {"prompt": "a", "max_tokens": 4.0},
        {"prompt": "b", "max_tokens": None},
        {"prompt": "c", "max_tokens": 2.5},
    ]
    (tmp_path / "a.parquet").write_bytes(parquet(rows))
    good, missing, bad = rows_of(tmp_path)
    assert (good.request.sampling.max_tokens, missing.request.sampling.max_tokens) == (4, None)
    assert bad.error.code == "invalid_sampling"


def test_other_types_are_carried_as_json_would_have_them(tmp_path: Path):
    row = {
        "prompt": "a", "when": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"),
        "data": b"\xff", "nan": float("nan"), "list": [1, 2],
    }  # fmt: skip
    (tmp_path / "a.parquet").write_bytes(parquet([row]))
    assert rows_of(tmp_path)[0].carried == {
        "when": "2026-01-02", "price": "1.50", "data": "/w==", "nan": None, "list": [1, 2],
    }  # fmt: skip


def test_row_numbers_count_over_row_groups(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(
        parquet([{"prompt": str(number)} for number in range(10)], group_rows=4)
    )
    rows = [row for shard in read_shards(tmp_path, ShardConfig(rows=3)) for row in shard.rows]
    assert [(row.offset, row.request.messages[0].content) for row in rows] == [(n, str(n)) for n in range(10)]


def test_a_row_group_that_cannot_be_decoded_gives_an_error_row_for_each_row(tmp_path: Path):
    rows = [{"prompt": f"text {number} " + "x" * 400} for number in range(20)]
    data = bytearray(parquet(rows, group_rows=10))
    data[8:400] = b"\xff" * 392
    (tmp_path / "a.parquet").write_bytes(bytes(data))
    found = rows_of(tmp_path)
    assert [row.offset for row in found] == list(range(20))
    assert {row.error.code for row in found[:10]} == {"unreadable_input"}
    assert {row.error for row in found[10:]} == {None}


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
    rows = rows_of(tmp_path)
    assert len(rows) == 5
    assert decode_rows(encode_rows(rows)) == rows


@pytest.mark.parametrize("limit", [None, 1])
def test_the_sample_has_rows_of_every_kind_of_file(tmp_path: Path, limit: int | None):
    (tmp_path / "a.parquet").write_bytes(parquet([{"prompt": "a", "x": 1}] * 3))
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"prompt": "a", "y": 1}]))
    sampled = list(sample_rows(find_input(str(tmp_path)), SamplingParams()))
    assert [dict(row.carried) for row in sampled] == [{"x": 1}] * 3 + [{"y": 1}]
