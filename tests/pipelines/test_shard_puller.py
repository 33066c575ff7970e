"""A replica's side of the desk, without Ray: rows of batch jobs through an engine that has other work too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from decimal import Decimal
from pathlib import Path
from typing import Any

from dflash_engine.config import EngineConfig
from dflash_engine.fake import FakeEngine
from dflash_engine.request import Priority
from pipelines.admission import Admission
from pipelines.attempts import Attempts
from pipelines.receipt import receipt_from_record
from pipelines.shard_desk import ServedEngine, ShardDesk, ShardKey, ShardOffer
from pipelines.shard_puller import ShardPuller
from pipelines.storage import LocalStore
from pipelines.write import Part, PartWriter
from tests.pipelines.helpers import output_rows, prompts
from tests.pipelines.test_generate import Watched, generated, shards_of, spec

LONG_S = 20.0
FAST = EngineConfig(model="fake", max_num_seqs=4, default_max_tokens=10)
SLOW = FAST.model_copy(update={"model": "fake:60"})


def stored(value: Any) -> list[Awaitable[Any]]:
    """What stands for a reference into the object store; it may be awaited often."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return [future]


def offered(shard: dict[str, Any], what: Any, fingerprint: str) -> ShardOffer:
    return ShardOffer(ShardKey("run", shard["shard_id"]), fingerprint, stored(what), stored(shard))


def puller(desk: ShardDesk, engine: FakeEngine, config: EngineConfig, room: Any, name: str) -> ShardPuller:
    served = ServedEngine(config, engine.fingerprint, use_gpu=False, most_replicas=1, shards_in_flight=2)
    return ShardPuller(lambda: desk, name, engine, served, room)


def test_its_parts_are_those_of_a_job_s_own_actor_and_its_rows_have_batch_priority(tmp_path: Path):
    rows = prompts(30)
    own = spec(tmp_path / "own")
    generated(own, shards_of(tmp_path, rows, 10))
    engine = Watched(FAST)

    async def story() -> list[Any]:
        desk, what = ShardDesk(), spec(tmp_path / "served")
        pulling = puller(desk, engine, FAST, lambda: 2, "one")
        task = asyncio.create_task(pulling.run())
        found = shards_of(tmp_path, rows, 10)
        offers = [desk.offer(offered(shard, what, engine.fingerprint), LONG_S) for shard in found]
        receipts = await asyncio.gather(*offers)
        task.cancel()
        await pulling.stop()
        return [receipt_from_record(receipt) for receipt in receipts]

    receipts = asyncio.run(story())
    assert output_rows(tmp_path / "served") == output_rows(tmp_path / "own")
    assert sum(receipt.totals.rows_ok for receipt in receipts) == 30
    assert {request.priority for request in engine.requests} == {Priority.BATCH}


def test_without_slack_it_takes_nothing_until_it_is_woken(tmp_path: Path):
    engine = FakeEngine(FAST)
    slack = [0]

    async def story() -> None:
        desk = ShardDesk()
        pulling = puller(desk, engine, FAST, lambda: slack[0], "one")
        task = asyncio.create_task(pulling.run())
        shard = shards_of(tmp_path, prompts(3))[0]
        waiting = asyncio.create_task(
            desk.offer(offered(shard, spec(tmp_path / "out"), engine.fingerprint), LONG_S)
        )
        for _ in range(20):
            await asyncio.sleep(0)
        assert not pulling.num_shards and not waiting.done()
        slack[0] = 1
        pulling.wake()
        assert receipt_from_record(await waiting).totals.rows_ok == 3
        task.cancel()
        await pulling.stop()

    asyncio.run(story())


class Looks(Admission):
    """Remembers how many deaths were known of each part that an engine was given."""

    def __init__(self, writer: PartWriter, budget_usd: Decimal | None) -> None:
        super().__init__(writer, budget_usd)
        self.deaths: list[int] = []

    async def look(self, part: Part) -> Attempts:
        found = await super().look(part)
        self.deaths.append(found.deaths)
        return found


async def until(condition: Any) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_replica_that_ends_gives_its_shard_back_and_that_is_no_death(tmp_path: Path):
    rows = prompts(4)

    async def story() -> list[int]:
        output = tmp_path / "out"
        admission = Looks(PartWriter(LocalStore(output), "parquet", {}), None)
        desk, what = ShardDesk(), spec(output, admission=admission)
        shard = shards_of(tmp_path, rows)[0]
        first, second = FakeEngine(SLOW), FakeEngine(FAST)
        ends = puller(desk, first, SLOW, lambda: 1, "ends")
        task = asyncio.create_task(ends.run())
        waiting = asyncio.create_task(desk.offer(offered(shard, what, first.fingerprint), LONG_S))
        await until(lambda: first.stats().running)
        task.cancel()
        await ends.stop()
        assert first.stats().running == 0
        goes_on = puller(desk, second, FAST, lambda: 1, "goes on")
        task = asyncio.create_task(goes_on.run())
        assert receipt_from_record(await waiting).totals.rows_ok == 4
        task.cancel()
        await goes_on.stop()
        return admission.deaths

    assert asyncio.run(story()) == [0, 0]
    assert len(output_rows(tmp_path / "out")) == 4


def test_rows_that_nobody_wants_any_more_leave_the_engine(tmp_path: Path):
    async def story() -> None:
        desk = ShardDesk()
        engine = FakeEngine(SLOW)
        pulling = puller(desk, engine, SLOW, lambda: 1, "one")
        task = asyncio.create_task(pulling.run())
        shard = shards_of(tmp_path, prompts(4))[0]
        waiting = asyncio.create_task(
            desk.offer(offered(shard, spec(tmp_path / "out"), engine.fingerprint), LONG_S)
        )
        await until(lambda: engine.stats().running)
        await desk.close_run("run")
        await until(lambda: not pulling.num_shards)
        assert engine.stats().running == 0
        waiting.cancel()
        task.cancel()
        await pulling.stop()

    asyncio.run(story())
