"""The desk between jobs and the engines of a service, as a plain object with a clock of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from dflash_engine.config import EngineConfig
from pipelines.shard_desk import SILENT_S, ServedEngine, ShardDesk, ShardKey, ShardOffer

NOW = 0.0
"""Messages that do not wait still let others run."""
LONG_S = 20.0
ENGINE = ServedEngine(EngineConfig(model="fake"), "f1", use_gpu=False, most_replicas=2, shards_in_flight=3)
OTHER = ServedEngine(EngineConfig(model="fake"), "f2", use_gpu=False, most_replicas=1, shards_in_flight=3)
RECEIPT = {"receipt": "{}"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def offer(shard_id: str, run: str = "run", fingerprint: str = "f1") -> ShardOffer:
    return ShardOffer(ShardKey(run, shard_id), fingerprint, ["spec"], [shard_id])


async def taken(desk: ShardDesk, replica: str, most: int = 9) -> list[str]:
    return [given.key.shard_id for given in await desk.take(replica, most, NOW)]


def test_a_shard_goes_to_one_replica_and_its_receipt_to_the_job_that_waits():
    async def story() -> Any:
        desk = ShardDesk(Clock())
        waiting = asyncio.create_task(desk.offer(offer("a"), LONG_S))
        assert await desk.beat("one", ENGINE, []) == []
        assert await desk.beat("two", ENGINE, []) == []
        assert await taken(desk, "one") == ["a"]
        assert await taken(desk, "two") == []
        assert not waiting.done()
        await desk.finish(ShardKey("run", "a"), RECEIPT)
        return await waiting

    assert asyncio.run(story()) == RECEIPT


def test_a_replica_that_waits_has_a_shard_as_soon_as_it_is_offered_and_no_more_than_it_asked_for():
    async def story() -> list[str]:
        desk = ShardDesk(Clock())
        await desk.beat("one", ENGINE, [])
        waiting = asyncio.create_task(desk.take("one", 1, LONG_S))
        await asyncio.sleep(0)
        for name in "ab":
            await desk.offer(offer(name), NOW)
        first = [given.key.shard_id for given in await waiting]
        return first + await taken(desk, "one")

    assert asyncio.run(story()) == ["a", "b"]


def test_what_a_silent_replica_had_is_offered_again_and_what_it_ends_later_counts_all_the_same():
    async def story() -> Any:
        clock = Clock()
        desk = ShardDesk(clock)
        await desk.beat("dies", ENGINE, [])
        await desk.offer(offer("a"), NOW)
        assert await taken(desk, "dies") == ["a"]
        for _ in range(4):
            clock.now_s += SILENT_S / 3
            await desk.beat("lives", ENGINE, [])
            await desk.offer(offer("a"), NOW)
        assert await taken(desk, "lives") == ["a"]
        # It was only slow: its shard is another's now, yet its receipt is as good.
        assert await desk.beat("dies", ENGINE, [ShardKey("run", "a")]) == [ShardKey("run", "a")]
        await desk.finish(ShardKey("run", "a"), RECEIPT)
        return await desk.offer(offer("a"), NOW)

    assert asyncio.run(story()) == RECEIPT


def test_what_a_replica_gives_back_or_leaves_is_there_for_others_at_once():
    async def story() -> None:
        desk = ShardDesk(Clock())
        for name in ("one", "two"):
            await desk.beat(name, ENGINE, [])
        for name in "ab":
            await desk.offer(offer(name), NOW)
        assert await taken(desk, "one") == ["a", "b"]
        await desk.give_back("one", [ShardKey("run", "b")])
        assert await taken(desk, "two") == ["b"]
        await desk.leave("one")
        assert await taken(desk, "two") == ["a"]
        assert len((await desk.view()).engines) == 1

    asyncio.run(story())


def test_shards_of_a_job_whose_process_is_gone_are_dropped_and_their_replica_hears_of_it():
    async def story() -> None:
        clock = Clock()
        desk = ShardDesk(clock)
        await desk.beat("one", ENGINE, [])
        for name in "ab":
            await desk.offer(offer(name), NOW)
        assert await taken(desk, "one", 1) == ["a"]
        for _ in range(4):
            clock.now_s += SILENT_S / 3
            unwanted = await desk.beat("one", ENGINE, [ShardKey("run", "a")])
        assert unwanted == [ShardKey("run", "a")]
        assert await taken(desk, "one") == []

    asyncio.run(story())


def test_a_run_that_ends_takes_its_own_shards_along_and_no_others():
    async def story() -> list[str]:
        desk = ShardDesk(Clock())
        await desk.beat("one", ENGINE, [])
        await desk.offer(offer("a", run="ended"), NOW)
        await desk.offer(offer("b"), NOW)
        await desk.close_run("ended")
        return await taken(desk, "one")

    assert asyncio.run(story()) == ["b"]


def test_a_replica_with_another_fingerprint_never_has_a_shard():
    async def story() -> None:
        desk = ShardDesk(Clock())
        await desk.beat("other", OTHER, [])
        await desk.offer(offer("a"), NOW)
        assert await taken(desk, "other") == []
        assert await taken(desk, "nobody knows") == []

    asyncio.run(story())


def test_a_service_that_drains_gives_no_shard_to_anybody():
    async def story() -> None:
        desk = ShardDesk(Clock())
        await desk.beat("one", ENGINE, [])
        await desk.offer(offer("a"), NOW)
        await desk.drain()
        assert await taken(desk, "one") == []
        assert (await desk.view()).draining

    asyncio.run(story())


def test_a_job_hears_for_how_long_there_has_been_no_engine():
    async def story() -> None:
        clock = Clock()
        desk = ShardDesk(clock)
        await desk.beat("one", ENGINE, [])
        assert await desk.offer(offer("a"), NOW) == 0.0
        clock.now_s += 100.0
        assert await desk.offer(offer("a"), NOW) == 100.0

    asyncio.run(story())
