"""Rows of Parquet files mean the same as lines of JSONL."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_engine.request import Message, SamplingParams
from pipelines.config import ShardConfig
from pipelines.rows import decode_rows, encode_rows
from tests.pipelines.helpers import jsonl, parquet, read_rows, read_shards

TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
MESSAGES = (Message("system", "s"), Message("user", "hi"))


def test_messages_may_be_structs_or_json_text(tmp_path: Path):
    struct = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
    (tmp_path / "a.parquet").write_bytes(parquet([{"messages": TURNS}], pa.schema([("messages", struct)])))
    (tmp_path / "b.parquet").write_bytes(parquet([{"messages": orjson.dumps(TURNS).decode()}]))
    (tmp_path / "c.jsonl").write_bytes(jsonl([{"messages": TURNS}]))
    rows = read_rows(tmp_path)
    assert [row.request.messages for row in rows] == [MESSAGES] * 3
    assert [row.row_id for row in rows] == ["a.parquet:0", "b.parquet:0", "c.jsonl:0"]


def test_a_batch_body_may_be_a_struct_with_empty_fields(tmp_path: Path):
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
    rows = [
        {**line, "body": {"messages": TURNS, "max_tokens": 3}},
        {**line, "body": {"messages": TURNS, "top_p": 0.5}},
    ]
    (tmp_path / "a.parquet").write_bytes(parquet(rows, pa.Table.from_pylist(rows).schema))
    first, second = read_rows(tmp_path)
    assert first.request.sampling == SamplingParams(max_tokens=3)
    assert second.request.sampling == SamplingParams(top_p=0.5)


def test_whole_numbers_in_floating_columns_are_integers_where_integers_are_wanted(tmp_path: Path):
    rows = [
        {"prompt": "a", "max_tokens": 4.0},
        {"prompt": "b", "max_tokens": None},
        {"prompt": "c", "max_tokens": 2.5},
    ]
    (tmp_path / "a.parquet").write_bytes(parquet(rows))
    good, missing, bad = read_rows(tmp_path)
    assert (good.request.sampling.max_tokens, missing.request.sampling.max_tokens) == (4, None)
    assert bad.error.code == "invalid_sampling"


def test_other_types_are_carried_as_json_would_have_them(tmp_path: Path):
    row = {
        "prompt": "a", "when": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"),
        "data": b"\xff", "nan": float("nan"), "list": [1, 2],
    }  # fmt: skip
    (tmp_path / "a.parquet").write_bytes(parquet([row]))
    assert read_rows(tmp_path)[0].carried == {
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
    found = read_rows(tmp_path)
    assert [row.offset for row in found] == list(range(20))
    (error,) = {row.error for row in found[:10]}
    assert error.code == "unreadable_input"
    assert {row.error for row in found[10:]} == {None}
    # The same where the group makes several shards.
    sliced = read_shards(tmp_path, ShardConfig(rows=3))
    assert [row for shard in sliced for row in shard.rows] == found


def test_text_that_is_not_utf8_is_an_error_of_its_row(tmp_path: Path):
    texts = pa.array([b"one", b"tw\xff", b"three"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"prompt": pa.array(texts)}), tmp_path / "a.parquet")
    good, bad, other = read_rows(tmp_path)
    assert (good.error, other.error) == (None, None)
    assert (bad.row_id, bad.error.code) == ("a.parquet:1", "invalid_utf8")
    assert "0xff" in bad.error.message


PART = pa.struct([("type", pa.string()), ("text", pa.large_string())])
TURN = pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.list_(PART))])


def test_nested_parts_in_whatever_encoding_are_messages(tmp_path: Path):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    rows = [{"messages": [{"role": "system", "content": parts[:1]}, {"role": "user", "content": parts}]}]
    schema = pa.schema([("messages", pa.large_list(TURN))])
    (tmp_path / "a.parquet").write_bytes(parquet(rows, schema))
    assert read_rows(tmp_path)[0].request.messages == (Message("system", "h"), Message("user", "hi"))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "no prompt"),
        ([], "the prompt is empty"),
        ([None], "message 0 is not an object with a role"),
        (
            [{"role": None, "content": [{"type": "text", "text": "a"}]}],
            "message 0 is not an object with a role",
        ),
        ([{"role": "user", "content": None}], "content is null"),
        ([{"role": "user", "content": [None]}], "only parts of type text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "only parts of type text"),
    ],
)
def test_nulls_inside_messages_are_errors_that_say_where(tmp_path: Path, messages: list | None, reason: str):
    (tmp_path / "a.parquet").write_bytes(
        parquet([{"messages": messages}], pa.schema([("messages", pa.list_(TURN))]))
    )
    (row,) = read_rows(tmp_path)
    assert row.error.code == "invalid_prompt"
    assert reason in row.error.message


def test_strings_of_all_encodings_are_text(tmp_path: Path):
    encodings = [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]
    for number, kind in enumerate(encodings):
        texts = pa.array(["a", None, "a"], pa.string()).cast(kind)
        pq.write_table(pa.table({"prompt": ["x"] * 3, "shop": texts}), tmp_path / f"{number}.parquet")
    assert [row.carried["shop"] for row in read_rows(tmp_path)] == ["a", None, "a"] * 3


EXACT = [2**53 + 1, -(2**63), 2**63 - 1, None]


def test_large_integers_are_carried_exactly(tmp_path: Path):
    table = {
        "prompt": ["x"] * 4,
        "i": pa.array(EXACT, pa.int64()),
        "u": pa.array([2**64 - 1] * 4, pa.uint64()),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"prompt": "x", "i": i, "u": 2**64 - 1} for i in EXACT]))
    rows = read_rows(tmp_path)
    assert [row.carried for row in decode_rows(encode_rows(rows))] == [
        {"i": i, "u": 2**64 - 1} for i in EXACT * 2
    ]
    assert [orjson.loads(row.raw)["i"] for row in rows] == EXACT * 2


def test_a_seed_beyond_2_53_stays_exact_beside_missing_ones(tmp_path: Path):
    seeds = pa.array([2**53 + 1, None], pa.int64())
    pq.write_table(pa.table({"prompt": ["x", "y"], "seed": seeds}), tmp_path / "a.parquet")
    assert [row.request.sampling.seed for row in read_rows(tmp_path)] == [2**53 + 1, None]
