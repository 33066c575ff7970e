"""The actor, called as Ray calls it but without Ray: rows in, one part and one receipt out."""

from __future__ import annotations

import asyncio
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError, EngineDead
from dflash_engine.fake import STEP_NS, FakeEngine
from dflash_engine.request import Request, Result, SamplingParams, TokenLogprob
from pipelines.admission import Admission
from pipelines.config import ShardConfig, TriesConfig
from pipelines.cost import CPU, Price, PriceTable
from pipelines.engines import EngineFactory, open_engine
from pipelines.errors import JobError
from pipelines.generate import QUEUED_PER_SEQUENCE, Generate, GenerateSpec
from pipelines.job import JOB_KEY, check_fingerprint
from pipelines.receipt import Receipt, receipt_from_record
from pipelines.rows import seed_for
from pipelines.storage import LocalStore
from pipelines.write import PartWriter
from tests.pipelines.helpers import error_records, jsonl, output_rows, read_shards

PRICES = PriceTable("prices.yaml", {CPU: Price(CPU, Decimal("3.6"), "2026-01-01", "test")})


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


def spec(output: Path, **changes: Any) -> GenerateSpec:
    values: dict[str, Any] = {
        "engine": EngineConfig(model="fake", max_num_seqs=4, default_max_tokens=10),
        "writer": PartWriter(LocalStore(output), "parquet", {"shop": "int64"}),
        "prices": PRICES,
        "accelerator": None,
        "job_seed": 0,
        "actors": 1,
        "use_gpu": False,
        "tries": TriesConfig(),
        "redos": {},
        "defaults": SamplingParams(),
    }
    values |= changes
    store = values["writer"].store
    store.put(JOB_KEY, b"{}")
    return GenerateSpec(**{"admission": Admission(values["writer"], None), **values})


def shards_of(tmp_path: Path, rows: list[Any], size: int = 100) -> list[dict[str, Any]]:
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl(rows))
    found = read_shards(file, ShardConfig(rows=size))
    return [shard.as_table().to_pylist()[0] for shard in found]


def generated(
    what: GenerateSpec, shards: list[dict[str, Any]], factory: EngineFactory = open_engine
) -> list[Receipt]:
    async def run() -> list[dict[str, Any]]:
        actor = Generate(what, factory)
        return await asyncio.gather(*(actor(shard) for shard in shards))

    return [receipt_from_record(record) for record in asyncio.run(run())]


class Exited(SystemExit):
    """Stands for the end of a process: asyncio lets nothing run after it."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that would end raises `Exited` instead."""

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)


class Watched(FakeEngine):
    """Keeps what it was asked, and how much at once."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.config = config
        self.requests: list[Request] = []
        self.now = self.most = 0

    async def generate(self, request: Request) -> Result:
        self.requests.append(request)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().generate(request)
        finally:
            self.now -= 1


def watched(engines: list[Watched]) -> EngineFactory:
    def factory(config: EngineConfig) -> Watched:
        engines.append(Watched(config))
        return engines[-1]

    return factory


def test_a_shard_becomes_one_part_with_its_rows_in_order(tmp_path: Path, output: Path):
    rows = [{"prompt": f"question {number}", "custom_id": number, "shop": number} for number in range(7)]
    (receipt,) = generated(spec(output), shards_of(tmp_path, rows))
    written = output_rows(output)
    assert [row["custom_id"] for row in written] == [str(number) for number in range(7)]
    assert [row["shop"] for row in written] == list(range(7))
    assert {row["status"] for row in written} == {"ok"}
    assert {row["model"] for row in written} == {"fake"}
    assert [path.name for path in (output / "data").iterdir()] == [f"part-{receipt.shard_id}.parquet"]
    assert not (output / "errors").exists()
    assert receipt.totals.rows_ok == 7
    assert receipt.totals.completion_tokens == sum(row["completion_tokens"] for row in written)


def test_each_row_is_priced_by_its_busy_time(tmp_path: Path, output: Path):
    (receipt,) = generated(spec(output), shards_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}]))
    for row in output_rows(output):
        steps = 1 + row["steps"]
        assert row["gpu_seconds"] == steps * STEP_NS / 1e9
        assert row["cost_usd"] == Decimal("3.6") * steps * STEP_NS / (3600 * 10**9)
    assert receipt.totals.cost_usd == sum(row["cost_usd"] for row in output_rows(output))


def test_an_engine_on_several_gpus_is_billed_for_all_of_them(tmp_path: Path, output: Path):
    shards = shards_of(tmp_path, [{"prompt": "a"}])
    generated(spec(output, engine=EngineConfig(model="fake", tensor_parallel_size=4)), shards)
    (row,) = output_rows(output)
    steps = 1 + row["steps"]
    assert row["gpu_seconds"] == 4 * steps * STEP_NS / 1e9
    assert row["cost_usd"] == Decimal("3.6") * 4 * steps * STEP_NS / (3600 * 10**9)


def test_bad_rows_stand_in_the_part_and_in_the_error_file(tmp_path: Path, output: Path):
    engine = EngineConfig(model="fake", max_model_len=5)
    rows = [{"prompt": "fine"}, {"prompt": 3, "custom_id": "x"}, {"prompt": "much too long a prompt"}]
    (receipt,) = generated(spec(output, engine=engine), shards_of(tmp_path, rows))
    assert (receipt.totals.rows_ok, receipt.totals.rows_error) == (1, 2)
    good, wrong, long = output_rows(output)
    assert (good["status"], good["error_type"]) == ("ok", None)
    assert (wrong["status"], wrong["error_type"], wrong["text"], wrong["cost_usd"]) == (
        "error",
        "invalid_prompt",
        None,
        0,
    )
    assert long["error_type"] == "context_length_exceeded"
    assert [
        (record["file"], record["offset"], record["error_type"], record["raw"])
        for record in error_records(output)
    ] == [
        ("in.jsonl", 18, "invalid_prompt", '{"prompt":3,"custom_id":"x"}'),
        ("in.jsonl", 47, "context_length_exceeded", '{"prompt":"much too long a prompt"}'),
    ]


def test_a_row_without_a_seed_gets_one_from_the_job_and_its_place_where_its_choice_has_noise(
    tmp_path: Path, output: Path
):
    engines: list[Watched] = []
    rows = [{"prompt": "a", "temperature": 1}, {"prompt": "b", "temperature": 1, "seed": 5}, {"prompt": "c"}]
    generated(spec(output, job_seed=3), shards_of(tmp_path, rows), watched(engines))
    seeds = [request.sampling.seed for request in engines[0].requests]
    assert seeds == [seed_for(3, "in.jsonl:0"), 5, None]


def test_rows_of_several_shards_are_in_the_engine_together_but_not_more_than_help(
    tmp_path: Path, output: Path
):
    engines: list[Watched] = []
    shards = shards_of(tmp_path, [{"prompt": f"question {number}"} for number in range(60)], size=6)
    receipts = generated(spec(output), shards, watched(engines))
    assert len(engines) == 1
    assert sum(receipt.totals.rows_ok for receipt in receipts) == 60
    assert engines[0].most == QUEUED_PER_SEQUENCE * 4 > 6


def test_the_cores_are_shared_out_where_there_is_no_gpu(tmp_path: Path, output: Path):
    cores = len(os.sched_getaffinity(0))
    for actors, threads, told in ((1, None, cores), (1000, None, 1), (1, 3, 3)):
        engines: list[Watched] = []
        engine = EngineConfig(model="fake", threads=threads)
        where = output / f"{actors}-{threads}"
        generated(
            spec(where, engine=engine, actors=actors),
            shards_of(tmp_path, [{"prompt": "a"}]),
            watched(engines),
        )
        assert engines[0].config.threads == told


def test_a_shard_that_is_written_is_passed_over(tmp_path: Path, output: Path):
    shards = shards_of(tmp_path, [{"prompt": f"question {number}"} for number in range(20)], size=10)
    generated(spec(output), shards[:1])
    part = next((output / "data").iterdir())
    before = (part.stat().st_mtime_ns, part.read_bytes())
    receipts = generated(spec(output), shards)
    assert sum(receipt.totals.rows_ok for receipt in receipts) == 20
    assert (part.stat().st_mtime_ns, part.read_bytes()) == before


def test_an_engine_that_cannot_start_fails_every_call_after_one_try(tmp_path: Path, output: Path):
    tries: list[EngineConfig] = []

    def factory(config: EngineConfig) -> FakeEngine:
        tries.append(config)
        raise ConfigError("no such model; name another")

    shards = shards_of(tmp_path, [{"prompt": f"question {number}"} for number in range(30)], size=10)
    receipts = generated(spec(output), shards, factory)
    assert {(receipt.failure, receipt.exit_code) for receipt in receipts} == {
        ("no such model; name another", 2)
    }
    assert len(tries) == 1
    assert not (output / "data").exists()


def test_an_engine_that_breaks_at_the_start_is_tried_in_new_processes_and_then_ends_the_job(
    tmp_path: Path, output: Path, exits: None
):
    def factory(config: EngineConfig) -> FakeEngine:
        raise MemoryError("too big")

    what = spec(output, tries=TriesConfig(start=3))
    shards = shards_of(tmp_path, [{"prompt": "a"}])
    for _ in range(2):
        with pytest.raises(Exited, match="1"):
            generated(what, shards, factory)
    (receipt,) = generated(what, shards, factory)
    assert receipt.exit_code == 1
    assert receipt.failure == "the engine did not start in 3 tries: MemoryError: too big"
    # And nothing is admitted any more, whoever asks.
    assert generated(what, shards)[0].failure == receipt.failure


def test_a_process_that_dies_while_it_loads_is_not_started_for_ever(
    tmp_path: Path, output: Path, exits: None
):
    def factory(config: EngineConfig) -> FakeEngine:
        raise Exited(9)

    what = spec(output, tries=TriesConfig(start=2))
    shards = shards_of(tmp_path, [{"prompt": "a"}])
    for _ in range(2):
        with pytest.raises(Exited, match="9"):
            generated(what, shards, factory)
    (receipt,) = generated(what, shards, factory)
    assert receipt.failure == (
        f"the engine did not start in 2 tries: process {os.getpid()} died while it was loading, without a "
        "word: killed from outside, most often for want of memory"
    )


def test_starts_that_failed_count_no_more_once_an_engine_has_started(
    tmp_path: Path, output: Path, exits: None
):
    def broken(config: EngineConfig) -> FakeEngine:
        raise MemoryError("another process has not gone yet")

    what = spec(output, tries=TriesConfig(start=2))
    shards = shards_of(tmp_path, [{"prompt": str(number)} for number in range(6)], size=1)
    for shard in shards:
        with pytest.raises(Exited):
            generated(what, [shard], broken)
        (receipt,) = generated(what, [shard])
        assert receipt.totals.rows_ok == 1


def test_an_engine_with_another_fingerprint_is_refused(tmp_path: Path, output: Path):
    check_fingerprint(LocalStore(output), "another")
    (receipt,) = generated(spec(output), shards_of(tmp_path, [{"prompt": "a"}]))
    assert receipt.exit_code == 2
    assert "fingerprint another" in (receipt.failure or "")


def test_a_price_that_is_not_known_is_refused_before_the_engine_loads(tmp_path: Path, output: Path):
    (receipt,) = generated(spec(output, accelerator="B200"), shards_of(tmp_path, [{"prompt": "a"}]))
    assert (receipt.exit_code, receipt.failure) == (
        2,
        "prices.yaml has no price for B200 (it has cpu); add one",
    )


def test_a_part_that_cannot_be_written_ends_the_job(tmp_path: Path, output: Path):
    output.mkdir()
    (output / "data").write_bytes(b"in the way")
    (receipt,) = generated(spec(output), shards_of(tmp_path, [{"prompt": "a"}]))
    assert receipt.exit_code == 1
    assert "cannot write" in (receipt.failure or "")


def test_a_row_that_upsets_the_engine_is_an_error_row(tmp_path: Path, output: Path):
    class Upset(FakeEngine):
        async def generate(self, request: Request) -> Result:
            if request.messages and request.messages[0].content == "odd":
                raise RuntimeError("cannot template this")
            return await super().generate(request)

    (receipt,) = generated(spec(output), shards_of(tmp_path, [{"prompt": "odd"}, {"prompt": "even"}]), Upset)
    assert (receipt.totals.rows_ok, receipt.totals.rows_error) == (1, 1)
    assert output_rows(output)[0]["error_type"] == "internal_error"
    assert output_rows(output)[0]["error_message"] == "RuntimeError: cannot template this (3 tries)"
    assert receipt.first_error == "RuntimeError: cannot template this (3 tries)"


def test_a_row_at_which_the_engine_fails_once_is_answered(tmp_path: Path, output: Path):
    class Moody(Watched):
        async def generate(self, request: Request) -> Result:
            if len(self.requests) < 2:
                self.requests.append(request)
                raise RuntimeError("not now")
            return await super().generate(request)

    (receipt,) = generated(spec(output), shards_of(tmp_path, [{"prompt": "a"}]), Moody)
    assert (receipt.totals.rows_ok, receipt.totals.rows_error) == (1, 0)


def test_a_dead_engine_ends_the_process_and_leaves_no_part(tmp_path: Path, output: Path, exits: None):
    class Dying(FakeEngine):
        async def generate(self, request: Request) -> Result:
            raise EngineDead("a step failed")

    with pytest.raises(Exited, match="1"):
        generated(spec(output), shards_of(tmp_path, [{"prompt": "a"}]), Dying)
    assert not (output / "data").exists()


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_log_probabilities_are_kept_where_they_were_asked_for(tmp_path: Path, output: Path, form: Any):
    class Telling(FakeEngine):
        async def generate(self, request: Request) -> Result:
            return Result(
                request_id="r", finish_reason="stop", logprobs=(TokenLogprob(3, -0.5, ((3, -0.5),)),)
            )

    writer = PartWriter(LocalStore(output), form, {})
    generated(spec(output, writer=writer), shards_of(tmp_path, [{"prompt": "a"}]), Telling)
    (row,) = output_rows(output)
    told = row["logprobs"] if form == "jsonl" else row["extra"]
    assert '"logprob":-0.5' in str(told).replace("'", '"').replace(" ", "")


class Poisoned(FakeEngine):
    """Dies of a prompt with the word poison in it, once others are in as well."""

    async def generate(self, request: Request) -> Result:
        assert request.messages
        if "poison" in request.messages[0].content:
            await asyncio.sleep(0)
            raise EngineDead("an illegal address")
        return await super().generate(request)


def until_done(
    what: GenerateSpec, shards: list[dict[str, Any]], factory: EngineFactory
) -> list[list[Receipt]]:
    """What Ray does: actors one after the other, each until it dies, then all shards in flight again."""
    lives = []
    while True:
        try:
            lives.append(generated(what, shards, factory))
        except Exited:
            lives.append([])
            continue
        return lives


def test_a_row_that_kills_the_engine_gets_an_error_row_and_all_others_their_answers(
    tmp_path: Path, output: Path, exits: None
):
    rows = [{"prompt": f"question {number}"} for number in range(60)]
    shards = shards_of(tmp_path, rows, size=20)
    until_done(spec(output / "healthy"), shards, open_engine)
    wanted = {row["row_id"]: row["text"] for row in output_rows(output / "healthy")}
    rows[33] = {"prompt": "poison!!!!!"}
    shards = shards_of(tmp_path, rows, size=20)
    lives = until_done(spec(output / "hurt"), shards, Poisoned)
    found = {row["row_id"]: row for row in output_rows(output / "hurt")}
    assert len(output_rows(output / "hurt")) == 60
    (bad,) = (row for row in found.values() if row["status"] == "error")
    assert (bad["row_id"], bad["error_type"]) == (list(found)[33], "engine_crash")
    assert bad["error_message"] == (
        "the engine died 2 times while this row was alone in it: EngineDead: an illegal address"
    )
    assert {row_id: row["text"] for row_id, row in found.items() if row is not bad} == {
        row_id: text for row_id, text in wanted.items() if row_id != bad["row_id"]
    }
    (record,) = error_records(output / "hurt")
    assert record["raw"] == '{"prompt":"poison!!!!!"}'
    # In company, alone, in a group, as a single row twice.
    assert len(lives) - 1 <= 5
    assert not list(LocalStore(output / "hurt").keys("_attempts/"))


def test_attempts_are_known_to_a_run_whose_driver_was_killed_too(tmp_path: Path, output: Path, exits: None):
    shards = shards_of(tmp_path, [{"prompt": "poison"}, {"prompt": "fine"}])
    deaths = 0
    while True:
        # Nothing is handed from run to run but the output.
        what = spec(output)
        for _ in range(2):
            try:
                (receipt,) = generated(what, shards, Poisoned)
            except Exited:
                deaths += 1
            else:
                assert (receipt.totals.rows_ok, receipt.totals.rows_error) == (1, 1)
                assert deaths < 10
                return


def test_a_shard_that_died_in_company_is_alone_in_the_engine_when_it_is_done_again(
    tmp_path: Path, output: Path, exits: None
):
    class Pair(FakeEngine):
        """Dies in its first life when two rows are in it, and in its second one when one is."""

        lives = 0

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            Pair.lives += 1
            self.rows = 0
            self.both = asyncio.Event()

        async def generate(self, request: Request) -> Result:
            self.rows += 1
            if Pair.lives == 1 and self.rows < 2:
                await self.both.wait()
            self.both.set()
            if Pair.lives < 3:
                raise EngineDead("died")
            await asyncio.sleep(0)
            assert self.rows == 1
            self.rows -= 1
            return await super().generate(request)

    shards = shards_of(tmp_path, [{"prompt": f"{number}"} for number in range(2)], size=1)
    lives = until_done(spec(output), shards, Pair)
    assert [len(life) for life in lives] == [0, 0, 2]
    assert sum(receipt.totals.rows_ok for receipt in lives[-1]) == 2


def test_a_store_that_is_away_for_a_moment_costs_no_shard(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pipelines.generate.WRITE_WAIT_S", 0.0)
    failures = [JobError("timed out"), JobError("timed out")]

    class Away(LocalStore):
        def put(self, key: str, data: bytes) -> None:
            super().put(key, data)
            if key.startswith("data/") and failures:
                raise failures.pop()

    what = spec(output, writer=PartWriter(Away(output), "parquet", {}))
    (receipt,) = generated(what, shards_of(tmp_path, [{"prompt": "a"}]))
    assert (receipt.failure, receipt.totals.rows_ok, failures) == (None, 1, [])


def test_a_node_that_does_not_see_the_output_is_refused(tmp_path: Path, output: Path):
    what = spec(output)
    (output / JOB_KEY).unlink()
    (receipt,) = generated(what, shards_of(tmp_path, [{"prompt": "a"}]))
    assert receipt.exit_code == 2
    assert "must be on a disk that all nodes share" in (receipt.failure or "")
