"""One engine as a replica, without Ray: messages, aborts, slack and health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dflash_engine.config import EngineConfig
from dflash_engine.errors import EngineDead, PromptTooLong
from dflash_engine.fake import FakeEngine
from dflash_engine.health import EngineHealth
from dflash_engine.request import Chunk, Priority, Request, SamplingParams
from pipelines.service import engine_replica
from pipelines.service.engine_replica import EngineReplica
from pipelines.service.serving_config import ServingConfig
from pipelines.shard_desk import ServedEngine, ShardDesk

LONG_S = 20.0


class Sick(FakeEngine):
    """Dies at a word, and has the health that a test gives it."""

    now = EngineHealth(alive=True)

    async def submit(self, request: Request) -> AsyncIterator[Chunk]:
        if request.text == "die":
            raise EngineDead("a step failed")
        async for chunk in super().submit(request):
            yield chunk

    def health(self) -> EngineHealth:
        return self.now


@contextlib.asynccontextmanager
async def replica(model: str = "fake", factory: Any = FakeEngine, **engine: Any) -> AsyncIterator[Any]:
    config = ServingConfig(engine=EngineConfig(model=model, max_num_seqs=2, **engine))
    ended: list[str] = []

    def served(fingerprint: str) -> ServedEngine:
        return ServedEngine(config.engine, fingerprint, False, 1, config.replicas.shards_in_flight)

    desk = ShardDesk()
    made = EngineReplica(config, served, "one", lambda: desk, factory=factory, end=ended.append)
    made.ended = ended  # type: ignore[attr-defined]
    try:
        yield made
    finally:
        await made.close()


def ask(text: str = "a b", priority: Priority = Priority.ONLINE, tokens: int = 20) -> Request:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(text=text, sampling=sampling, request_id=text, priority=priority)


def test_messages_hold_the_engine_s_chunks_in_order_and_fewer_of_them_where_many_are_ready():
    async def story() -> None:
        request = ask(tokens=300)
        wanted = [chunk async for chunk in FakeEngine(EngineConfig(model="fake")).submit(request)]
        async with replica() as made:
            messages = [message async for message in made.answer(request)]
        got = [chunk for message in messages for chunk in message.chunks]
        assert [(chunk.text, chunk.tokens) for chunk in got] == [
            (chunk.text, chunk.tokens) for chunk in wanted
        ]
        assert got[-1].result is not None and got[-1].result.tokens == wanted[-1].result.tokens
        assert len(messages) < len(got) / 3

    asyncio.run(story())


def test_an_answer_that_is_left_ends_its_request_and_makes_room_for_shards():
    async def story() -> None:
        async with replica("fake:60") as made:
            answers = [made.answer(ask(text)) for text in ("a", "b")]
            first = [asyncio.create_task(anext(answer)) for answer in answers]
            async with asyncio.timeout(LONG_S):
                while (await made.stats()).running < 2:
                    await asyncio.sleep(0.001)
            assert made._room() == 0
            first[0].cancel()
            await asyncio.gather(first[0], return_exceptions=True)
            assert (await made.stats()).running == 1
            assert made._room() == 4
            first[1].cancel()
            await asyncio.gather(first[1], return_exceptions=True)

    asyncio.run(story())


def test_requests_of_batch_keys_leave_the_room_of_shards_as_it_is():
    async def story() -> None:
        async with replica("fake:60") as made:
            answers = [made.answer(ask(text, Priority.BATCH)) for text in ("a", "b")]
            first = [asyncio.create_task(anext(answer)) for answer in answers]
            async with asyncio.timeout(LONG_S):
                while (await made.stats()).running < 2:
                    await asyncio.sleep(0.001)
            assert made._room() == 4
            for task in first:
                task.cancel()
            await asyncio.gather(*first, return_exceptions=True)

    asyncio.run(story())


def test_a_request_error_is_the_last_message_and_leaves_the_replica_well():
    async def story() -> None:
        async with replica(max_model_len=4) as made:
            [message] = [message async for message in made.answer(ask("one two three four five"))]
            assert isinstance(message.error, PromptTooLong)
            await made.check_health()
            assert made.ended == []

    asyncio.run(story())


def test_a_dead_engine_is_told_and_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_replica, "LAST_WORDS_S", 0.0)

    async def story() -> None:
        async with replica(factory=Sick) as made:
            await made.check_health()
            [message] = [message async for message in made.answer(ask("die"))]
            assert isinstance(message.error, EngineDead)
            with pytest.raises(EngineDead):
                await made.check_health()
            assert made._room() == 0
            async with asyncio.timeout(LONG_S):
                while not made.ended:
                    await asyncio.sleep(0.001)
            assert made.ended == ["the engine died: a step failed"]

    asyncio.run(story())


def test_a_stuck_engine_ends_the_process_and_one_that_closed_itself_is_not_well():
    async def story() -> None:
        async with replica(factory=Sick) as made:
            made._engine.now = EngineHealth(alive=True, stalled_s=59.0)
            await made.check_health()
            assert made.ended == []
            made._engine.now = EngineHealth(alive=True, stalled_s=61.0)
            await made.check_health()
            assert made.ended == ["the engine is stuck: no round has ended for 61 s"]
            made._engine.now = EngineHealth(alive=False)
            with pytest.raises(EngineDead):
                await made.check_health()

    asyncio.run(story())
