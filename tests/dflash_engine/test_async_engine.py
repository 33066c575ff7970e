"""The engine for many callers at once."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from dflash_engine import (
    AsyncEngine,
    DFlashEngine,
    EngineConfig,
    EngineDead,
    Priority,
    PromptTooLong,
    Request,
    SamplingParams,
)
from dflash_engine.health import EngineHealth, Heartbeat
from dflash_engine.runner import Runner
from tests.helpers import tiny_draft_folder, tiny_model_folder

SETTINGS = {"max_model_len": 200, "kv_cache_tokens": 1600, "threads": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("async")
    target = tiny_model_folder(root, "qwen3")
    return {"model": str(target), "draft": str(tiny_draft_folder(root, target))}


def request(index: int, max_tokens: int = 20, **fields) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=index, ignore_eos=True)
    return Request(token_ids=(5, 6, 7 + index, 8) * 5, sampling=params, **fields)


def run(folders, scenario):
    async def main():
        engine = AsyncEngine(EngineConfig(**folders, **SETTINGS))
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def test_many_callers_get_what_each_would_get_alone(folders):
    alone = DFlashEngine(**folders, **SETTINGS)
    expected = [alone.generate(request(index)).tokens for index in range(24)]

    async def scenario(engine):
        results = await asyncio.gather(*(engine.generate(request(index)) for index in range(24)))
        assert [result.tokens for result in results] == expected
        stats = engine.stats()
        assert sum(result.usage.busy_ns for result in results) == stats.busy_ns
        assert stats.running == stats.waiting == 0

    run(folders, scenario)


def test_a_stream_comes_in_pieces_while_others_run(folders):
    async def scenario(engine):
        other = asyncio.create_task(engine.generate(request(1, 60)))
        chunks = [chunk async for chunk in engine.submit(request(2))]
        assert len(chunks) > 3
        assert "".join(chunk.text for chunk in chunks) == chunks[-1].result.text
        assert len((await other).tokens) == 60

    run(folders, scenario)


def test_a_refused_request_is_an_answer_to_that_request_alone(folders):
    async def scenario(engine):
        good = asyncio.create_task(engine.generate(request(1)))
        with pytest.raises(PromptTooLong):
            await engine.generate(Request(token_ids=(5,) * 200))
        assert len((await good).tokens) == 20

    run(folders, scenario)


def test_an_aborted_request_ends_with_what_it_has(folders):
    async def scenario(engine):
        chunks = []
        async for chunk in engine.submit(request(1, 150, request_id="mine")):
            chunks.append(chunk)
            engine.abort("mine")
        result = chunks[-1].result
        assert result.finish_reason == "abort" and 0 < len(result.tokens) < 150

    run(folders, scenario)


def test_a_caller_that_goes_away_frees_its_seat(folders):
    async def scenario(engine):
        stream = engine.submit(request(1, 150))
        await anext(stream)
        await stream.aclose()
        cancelled = asyncio.create_task(engine.generate(request(2, 150)))
        await anext(engine.submit(request(3, 3)))
        cancelled.cancel()
        await engine.generate(request(4))
        result = await engine.generate(request(5))
        stats = engine.stats()
        assert len(result.tokens) == 20 and stats.running == 0
        assert stats.completion_tokens < 150

    run(folders, scenario)


def test_online_requests_go_ahead_of_batch_ones(folders):
    settings = {**SETTINGS, "max_num_seqs": 1}

    async def main():
        engine = AsyncEngine(EngineConfig(**folders, **settings))
        order = []

        async def ask(name, priority, max_tokens):
            await engine.generate(request(len(name), max_tokens, priority=priority))
            order.append(name)

        batch = [asyncio.create_task(ask(f"batch {n}", Priority.BATCH, 60)) for n in range(3)]
        await asyncio.sleep(0)
        await ask("online", Priority.ONLINE, 5)
        await asyncio.gather(*batch)
        await engine.close()
        assert order[0] == "online"

    asyncio.run(main())


def test_a_round_that_hangs_is_found_and_a_rest_is_none(folders, monkeypatch):
    hanging, released = threading.Event(), threading.Event()
    execute = Runner.execute

    def hang(*arguments):
        hanging.set()
        assert released.wait(20)
        return execute(*arguments)

    async def scenario(engine):
        now = [100.0]
        engine._heartbeat._clock = lambda: now[0]
        assert engine.health() == EngineHealth(alive=True, stalled_s=0.0)
        monkeypatch.setattr(Runner, "execute", hang)
        answer = asyncio.create_task(engine.generate(request(1)))
        assert await asyncio.to_thread(hanging.wait, 20)
        now[0] += 75
        assert engine.health() == EngineHealth(alive=True, stalled_s=75.0)
        released.set()
        assert len((await answer).tokens) == 20
        # The last piece is given out before the thread has seen that nothing is left.
        engine._tell(hanging.clear)
        while hanging.is_set() or engine._heartbeat._since_s is not None:
            await asyncio.sleep(0)
        now[0] += 1000
        assert engine.health() == EngineHealth(alive=True, stalled_s=0.0)
        return engine

    assert not run(folders, scenario).health().alive


def test_time_without_a_beat_counts_from_the_last_one():
    now = [5.0]
    heart = Heartbeat(lambda: now[0])
    assert heart.stalled_s() == 0
    heart.beat()
    now[0] = 7.0
    assert heart.stalled_s() == 2
    heart.beat()
    assert heart.stalled_s() == 0
    now[0] = 9.0
    heart.rest()
    assert heart.stalled_s() == 0


def test_a_dead_engine_says_so_to_everyone_and_for_ever(folders, monkeypatch):
    def fail(*_):
        raise RuntimeError("the device fell off")

    async def scenario(engine):
        monkeypatch.setattr(Runner, "execute", fail)
        results = await asyncio.gather(
            *(engine.generate(request(index)) for index in range(3)), return_exceptions=True
        )
        monkeypatch.undo()
        assert all(isinstance(result, EngineDead) and "fell off" in str(result) for result in results)
        with pytest.raises(EngineDead):
            await engine.generate(request(1))
        assert not engine.health().alive

    run(folders, scenario)


def test_closing_ends_the_thread_and_tells_who_still_waits(folders):
    async def main():
        engine = AsyncEngine(EngineConfig(**folders, **SETTINGS))
        waiting = asyncio.create_task(engine.generate(request(1, 170)))
        stream = engine.submit(request(2, 170))
        await anext(stream)
        await engine.close()
        with pytest.raises(EngineDead):
            await waiting
        await stream.aclose()
        with pytest.raises(EngineDead):
            await engine.generate(request(3))

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "dflash-engine"]


def test_what_an_engine_holds_for_life_is_left_out_of_collections_until_it_is_closed(folders):
    async def scenario(engine: AsyncEngine) -> int:
        return gc.get_freeze_count()

    gc.unfreeze()
    assert run(folders, scenario) > 1000
    assert gc.get_freeze_count() == 0


def test_a_new_grammar_is_compiled_off_the_callers_event_loop(folders, monkeypatch):
    threads = []

    async def scenario(engine: AsyncEngine) -> None:
        def prepare(request: Request) -> None:
            threads.append(threading.current_thread())
            raise PromptTooLong("seen")

        monkeypatch.setattr(engine._core, "prepare", prepare)
        for sampling in (SamplingParams(regex="a+"), SamplingParams()):
            with pytest.raises(PromptTooLong):
                await engine.generate(Request(token_ids=(5,), sampling=sampling))

    run(folders, scenario)
    assert threads[0] is not threading.main_thread() and threads[1] is threading.main_thread()
