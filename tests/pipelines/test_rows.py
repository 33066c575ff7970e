"""Columns of the output: one schema for a whole job, and no carried value lost."""

from __future__ import annotations

import orjson
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.rows import RESULT_FIELDS, carried_columns, carried_kinds, output_schema, seed_for

SCALARS = [None, True, 0, -3, 2**53 + 1, 2**63, 1.5, -0.0, "", "text", "7"]
VALUES = st.sampled_from([*SCALARS, [], [1, "a"], {}, {"x": None}])
ROWS = st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, max_size=3), max_size=4)


def test_the_output_has_the_documented_columns_in_order():
    names = "row_id custom_id status text finish_reason prompt_tokens cached_tokens completion_tokens steps"
    names += " drafted_tokens accepted_tokens gpu_seconds cost_usd error_type error_message model shop extra"
    assert output_schema({"shop": "int64"}).names == names.split()


def test_kinds_follow_the_values_that_agree():
    samples = [
        {"s": "x", "i": 1, "d": 1.5, "b": True, "m": 1, "n": None, "o": {}},
        {"i": 2, "d": 2, "m": "x", "late": 1},
    ]
    assert carried_kinds(samples) == {
        "s": "string", "i": "int64", "d": "double", "b": "bool", "m": "json", "n": "json", "o": "json",
        "late": "int64",
    }  # fmt: skip


def test_what_does_not_fit_goes_into_extra():
    kinds = carried_kinds([{"i": 1, "d": 1.5}])
    assert carried_columns({"i": 2, "d": 3}, kinds) == {"i": 2, "d": 3, "extra": None}
    columns = carried_columns({"i": "two", "d": True, "new": [1]}, kinds)
    assert orjson.loads(columns.pop("extra")) == {"i": "two", "d": True, "new": [1]}
    assert columns == {}


@settings(deadline=None)
@given(sample=ROWS, rows=ROWS)
def test_every_carried_value_can_be_found_again(sample: list[dict], rows: list[dict]):
    kinds = carried_kinds(sample)
    schema = pa.schema([field for field in output_schema(kinds) if field not in RESULT_FIELDS])
    table = pa.Table.from_pylist([carried_columns(row, kinds) for row in rows], schema=schema)
    for row, written in zip(rows, table.to_pylist(), strict=True):
        extra = orjson.loads(written["extra"] or "{}")
        for name, value in row.items():
            if name in extra:
                found = extra[name]
            elif kinds[name] == "json" and written[name] is not None:
                found = orjson.loads(written[name])
            else:
                found = written[name]
            assert found == orjson.loads(orjson.dumps(value))


def test_seeds_depend_on_job_and_row_and_stay_in_range():
    seeds = {seed_for(job, f"f:{row}") for job in range(3) for row in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    # A value that a later version must keep, or resumed jobs would change their answers.
    assert seed_for(0, "f.jsonl:0") == 7545510279615187938
