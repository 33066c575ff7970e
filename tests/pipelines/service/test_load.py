"""Load over real sockets: many clients at once, a third of which go in mid-stream, leave nothing behind.

The tiny model is for every day. The embedded one shows its figures:

    .venv/bin/python -m pytest -q -s --full tests/pipelines/service/test_load.py
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dflash_engine.async_engine import AsyncEngine
from dflash_engine.config import EngineConfig
from pipelines.service.app import create_app
from pipelines.service.config import ServiceConfig
from pipelines.service.local import served_model, serving
from pipelines.service.usage_record import UsageRecord
from tests.helpers import tiny_draft_folder, tiny_model_folder

NUM_REQUESTS = 200
AT_ONCE = 32
REPEATS = 3
CUT_AFTER_EVENTS = 4
"""Both APIs have begun the text by then."""
MAX_GROWTH_BYTES = 16 << 20
"""Of the resident memory from the first repeat to the last: 40 KiB for each request between."""
ENDS = {"/v1/chat/completions": b"data: [DONE]\n\n", "/v1/messages": b"event: message_stop\n"}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; `cut` says that its client goes once it has read the beginning."""

    path: str
    body: dict[str, Any]
    cut: bool


@dataclass(frozen=True, slots=True)
class Load:
    """What a repeat gave."""

    took_s: float
    rss_bytes: int
    statuses: frozenset[int]
    num_cut: int
    records: tuple[UsageRecord, ...]


@dataclass(slots=True)
class Loaded:
    """A service, its engine, and the record of every request that left it."""

    url: str
    engine: AsyncEngine
    records: deque[UsageRecord]


def asks(repeat: int, long: int) -> list[Ask]:
    """Both APIs by turns, of the whole answers every other one streamed; no prompt is asked twice."""
    made = []
    for number in range(NUM_REQUESTS):
        cut, path = number % 3 == 0, tuple(ENDS)[number % 2]
        question = f"Question {number} of round {repeat}: where is my order? " + "Please. " * (number % 4)
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": long if cut else 2 + number % 9,
            "stream": cut or number % 4 < 2,
        }
        if path == "/v1/chat/completions":
            body |= {"seed": number, "ignore_eos": cut}
        made.append(Ask(path, body, cut))
    return made


async def answered(http: httpx2.AsyncClient, ask: Ask) -> tuple[int, bool]:
    """The status, and whether the client went before the end."""
    async with http.stream("POST", ask.path, json={"model": "m", **ask.body}) as answer:
        seen = b""
        async for piece in answer.aiter_raw():
            seen += piece
            if ask.cut and seen.count(b"\n\n") >= CUT_AFTER_EVENTS and ENDS[ask.path] not in seen:
                return answer.status_code, True  # leaving closes the socket
    assert not ask.body["stream"] or ENDS[ask.path] in seen, seen[-500:]
    return answer.status_code, False


async def loaded(url: str, todo: list[Ask]) -> list[tuple[int, bool]]:
    """All of it, `AT_ONCE` at a time."""
    left = iter(todo)
    async with httpx2.AsyncClient(base_url=url, verify=False, timeout=600) as http:

        async def client() -> list[tuple[int, bool]]:
            return [await answered(http, ask) for ask in left]

        return list(chain.from_iterable(await asyncio.gather(*(client() for _ in range(AT_ONCE)))))


@contextmanager
def service(config: EngineConfig) -> Iterator[Loaded]:
    settings = ServiceConfig(model_name="m")
    engine = AsyncEngine(config)
    records: deque[UsageRecord] = deque()
    app = create_app(engine, served_model(config, settings), settings, on_usage=records.append)
    try:
        with serving(app) as url:
            yield Loaded(url, engine, records)
    finally:
        asyncio.run(engine.close())


def one_load(here: Loaded, repeat: int, long: int) -> Load:
    here.records.clear()
    began_s = time.monotonic()
    outcomes = asyncio.run(loaded(here.url, asks(repeat, long)))
    took_s = time.monotonic() - began_s
    # The engine takes commands in their order: when this one is answered, nobody before it is left.
    last = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Bye"}]}
    until(lambda: len(here.records) == NUM_REQUESTS)
    assert httpx2.post(f"{here.url}/v1/messages", json=last, verify=False, timeout=60).status_code == 200
    gc.collect()
    statuses, cuts = zip(*outcomes, strict=True)
    kept = tuple(here.records)[:NUM_REQUESTS]
    return Load(took_s, resident_bytes(), frozenset(statuses), sum(cuts), kept)


def until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    """Clients that went are found gone by the server's own loop, which tells nobody here."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, "requests are left in the service"
        time.sleep(0.01)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_nothing_is_left(here: Loaded, free_blocks: int) -> None:
    scheduler = here.engine._core._scheduler
    scheduler.check_integrity()
    scheduler.check_idle()
    assert scheduler.stats().free_blocks == free_blocks
    stats = here.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert not here.engine._callers and not here.engine._core.has_work
    assert here.engine.health().alive


def check_load(config: EngineConfig, long: int) -> list[Load]:
    """Cut clients ask for answers of `long` tokens."""
    loads = []
    with service(config) as here:
        free_blocks = here.engine._core._scheduler.stats().free_blocks
        for repeat in range(REPEATS):
            loads.append(one_load(here, repeat, long))
            check_nothing_is_left(here, free_blocks)
    for load in loads:
        assert load.statuses == {200}
        assert load.num_cut > NUM_REQUESTS // 4
        # One may be cut off when its answer has just been made.
        unfinished = sum(not record.finished for record in load.records)
        assert load.num_cut // 2 < unfinished <= load.num_cut
    assert loads[-1].rss_bytes - loads[0].rss_bytes < MAX_GROWTH_BYTES
    return loads


@pytest.mark.slow
def test_a_tiny_model_is_idle_and_whole_after_clients_that_come_and_go(tmp_path):
    folder = tiny_model_folder(tmp_path, "llama", num_hidden_layers=3)
    draft = tiny_draft_folder(tmp_path, folder)
    # A small pool, so that its blocks are used again, and more clients than seats, so that some wait.
    config = EngineConfig(
        model=str(folder), draft=str(draft), device="cpu", max_num_seqs=16, kv_cache_tokens=3072, threads=1
    )
    check_load(config, long=300)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_embedded_model_is_idle_and_whole_after_clients_that_come_and_go():
    config = EngineConfig(model="smollm2-135m", device="cpu", kv_cache_tokens=16_384)
    for load in check_load(config, long=256):
        tokens = sum(record.usage.completion_tokens for record in load.records)
        print(
            f"{NUM_REQUESTS} requests, {AT_ONCE} at once, {load.num_cut} cut: {load.took_s:.1f} s, "
            f"{NUM_REQUESTS / load.took_s:.2f} requests/s, {tokens / load.took_s:.1f} tokens/s, "
            f"RSS {load.rss_bytes / 2**20:.1f} MiB"
        )
