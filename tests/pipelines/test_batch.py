"""Whole jobs on a real Ray cluster, with the fake engine."""

from __future__ import annotations

import gzip
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError, EngineDead
from dflash_engine.fake import FakeEngine
from dflash_engine.request import Request, Result
from pipelines.batch import run_batch
from pipelines.config import BatchConfig, ShardConfig
from pipelines.errors import JobError, JobRefused
from pipelines.inputs import Input
from pipelines.report import Summary
from pipelines.shards import Piece, plan
from tests.pipelines.helpers import jsonl, output_rows, parquet, prompts

# Ray Data warns of its own deprecated settings when it sets their defaults.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data")]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all jobs of this file; a job leaves a cluster that it did not start."""
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    yield
    ray.shutdown()


def job(tmp_path: Path, **settings) -> BatchConfig:
    values = {"output": str(tmp_path / "out"), "engine": {"model": "fake"}, "sampling": {"max_tokens": 12}}
    return BatchConfig(**{"input": str(tmp_path / "in"), "shard": {"rows": 10}, **values, **settings})


def run(config: BatchConfig) -> Summary:
    return run_batch(config, io.StringIO())


def test_every_row_of_all_kinds_of_files_is_answered_once(tmp_path: Path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(jsonl(prompts(35)))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(prompts(24))))
    (folder / "c.jsonl.zst").write_bytes(pa.compress(jsonl(prompts(5)), "zstd", asbytes=True))
    (folder / "d.parquet").write_bytes(parquet(prompts(18), group_rows=8))
    summary = run(job(tmp_path))
    rows = output_rows(tmp_path / "out")
    assert len({row["row_id"] for row in rows}) == len(rows) == summary.totals.rows_ok == 82
    # The answer hangs on the prompt alone, so the same prompt has the same one from each file.
    answers = {(row["custom_id"], row["text"]) for row in rows}
    assert len(answers) == 35
    assert summary.duplicate_custom_ids == 82 - 35


def test_a_rerun_does_what_is_missing_and_a_third_run_nothing(tmp_path: Path):
    (tmp_path / "in").write_bytes(jsonl(prompts(40)))
    config = job(tmp_path)
    first = run(config)
    before = output_rows(tmp_path / "out")
    (tmp_path / "out" / "_manifest.json").unlink()
    parts = sorted((tmp_path / "out" / "data").iterdir())
    kept = {path: path.stat().st_mtime_ns for path in parts[1:]}
    parts[0].unlink()
    second = run(config)
    assert output_rows(tmp_path / "out") == before
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert second.totals == first.totals
    log = io.StringIO()
    assert run_batch(config, log) == second
    assert log.getvalue() == ""


def test_a_dead_actor_is_replaced_and_no_row_is_lost_or_doubled(tmp_path: Path):
    (tmp_path / "in").write_bytes(jsonl(prompts(40)))
    died = tmp_path / "died"

    class DiesOnce(FakeEngine):
        async def generate(self, request: Request) -> Result:
            result = await super().generate(request)
            if "number 17 " in request.messages[0].content and not died.exists():
                died.touch()
                raise EngineDead("a step failed")
            return result

    config = job(tmp_path)
    summary = run_batch(config, io.StringIO(), DiesOnce)
    assert died.exists()
    rows = output_rows(tmp_path / "out")
    assert len({row["row_id"] for row in rows}) == len(rows) == summary.totals.rows_ok == 40


def test_an_engine_that_cannot_start_ends_the_job_in_one_sentence(tmp_path: Path):
    (tmp_path / "in").write_bytes(jsonl(prompts(40)))

    def factory(config: EngineConfig) -> FakeEngine:
        raise ConfigError("model x: there is no such folder")

    with pytest.raises(JobRefused, match=r"^model x: there is no such folder$"):
        run_batch(job(tmp_path), io.StringIO(), factory)


def test_an_input_that_goes_away_ends_the_job_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "in").write_bytes(jsonl(prompts(40)))

    def plan_and_lose(source: Input, shard: ShardConfig) -> list[Piece]:
        pieces = plan(source, shard)
        (tmp_path / "in").unlink()
        return pieces

    monkeypatch.setattr("pipelines.batch.plan", plan_and_lose)
    with pytest.raises(JobError, match=r"/in does not exist$"):
        run(job(tmp_path))


def test_jsonl_output_keeps_carried_values_as_they_came_and_a_limit_is_kept(tmp_path: Path):
    values = [1, "one", None, [1], {"a": 1.5}, True, "beyond the limit"]
    (tmp_path / "in").write_bytes(jsonl([{"prompt": "p", "value": value} for value in values]))
    summary = run(job(tmp_path, format="jsonl", limit=6, shard={"rows": 4}))
    assert [row["value"] for row in output_rows(tmp_path / "out")] == values[:6]
    assert summary.totals.rows_ok == 6


def test_every_part_of_a_job_has_the_same_columns(tmp_path: Path):
    rows = [{"prompt": "p", "value": number if number < 300 else "late"} for number in range(330)]
    (tmp_path / "in").write_bytes(jsonl(rows))
    run(job(tmp_path, shard={"rows": 50}))
    parts = sorted((tmp_path / "out" / "data").iterdir())
    assert len({str(pq.read_schema(part)) for part in parts}) == 1
    written = output_rows(tmp_path / "out")
    assert [row["value"] for row in written[:300]] == list(range(300))
    assert {(row["value"], row["extra"]) for row in written[300:]} == {(None, '{"value":"late"}')}


def test_an_input_without_rows_gives_an_empty_job(tmp_path: Path):
    (tmp_path / "in").write_bytes(b"\n\n")
    summary = run(job(tmp_path))
    assert (summary.totals.rows, summary.parts, summary.exit_code) == (0, 0, 0)


def test_a_request_that_is_in_a_shard_twice_is_computed_once_and_billed_once(tmp_path: Path):
    rows = [{"prompt": "the same question", "custom_id": str(number)} for number in range(8)]
    (tmp_path / "in").write_bytes(jsonl([*rows, *prompts(2)]))
    plain = run(job(tmp_path, output=str(tmp_path / "plain")))
    summary = run(job(tmp_path, dedupe=True))
    # The end of an input is cut finer, and each shard computes for itself.
    copied = summary.totals.rows_copied
    assert plain.totals.rows_copied == 0 and 1 <= copied <= 7
    found = {row["row_id"]: row for row in output_rows(tmp_path / "out")}
    for row in output_rows(tmp_path / "plain"):
        same = ("text", "completion_tokens", "steps", "custom_id")
        assert [row[name] for name in same] == [found[row["row_id"]][name] for name in same]
    paid = [row for row in found.values() if row["cost_usd"]]
    assert len(paid) == 10 - copied and summary.totals.cost_usd < plain.totals.cost_usd
    same_tokens = next(row["completion_tokens"] for row in paid if row["custom_id"] == "0")
    assert summary.totals.copied_tokens == copied * same_tokens


def test_token_ids_stand_in_columns_of_their_own(tmp_path: Path):
    (tmp_path / "in").write_bytes(jsonl([{"prompt": "one two", "token_ids": "mine"}, {"prompt": 3}]))
    run(job(tmp_path, output_token_ids=True))
    [path] = (tmp_path / "out" / "data").iterdir()
    table = pq.read_table(path)
    assert table.schema.field("token_ids").type == pa.list_(pa.int32())
    answered, failed = table.to_pylist()
    assert len(answered["token_ids"]) == answered["completion_tokens"]
    assert len(answered["prompt_token_ids"]) == answered["prompt_tokens"]
    assert failed["token_ids"] is None and failed["prompt_token_ids"] is None
    assert answered["input_token_ids"] == "mine"


def test_parts_can_be_lines_of_the_batch_api(tmp_path: Path):
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Say"}},
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": "Hi"}]}},
        {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {}},
    ]  # fmt: skip
    (tmp_path / "in").write_bytes(jsonl(lines))
    summary = run(job(tmp_path, format="openai"))
    assert (summary.totals.rows_ok, summary.totals.rows_error) == (2, 1)
    [path] = (tmp_path / "out" / "data").iterdir()
    assert path.suffix == ".jsonl"
    found = {row["custom_id"]: row for row in map(orjson.loads, path.read_bytes().splitlines())}
    assert found["a"]["response"]["body"]["object"] == "text_completion"
    assert found["b"]["response"]["body"]["object"] == "chat.completion"
    assert found["c"]["response"]["status_code"] == 400
    assert run(job(tmp_path, format="openai")).totals == summary.totals


def test_an_output_that_holds_the_input_is_refused(tmp_path: Path):
    (tmp_path / "in").write_bytes(jsonl(prompts(1)))
    with pytest.raises(JobRefused, match="holds the input too"):
        run(job(tmp_path, output=str(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"actors": {"min": 9}}, "actors.min = 9, but there is room for 1 on this machine's CPU cores"),
        ({"engine": {"model": "fake", "device": "cuda"}}, "room for 0 on this machine's GPUs"),
    ],
)
def test_actors_that_would_wait_for_ever_are_refused(tmp_path: Path, settings: dict, reason: str):
    (tmp_path / "in").write_bytes(jsonl(prompts(1)))
    with pytest.raises(JobRefused, match=reason):
        run(job(tmp_path, **settings))
