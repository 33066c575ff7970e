"""One engine as a replica of the service: answers in messages, health, and batch shards in its slack."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple, Protocol, cast

from dflash_engine.config import EngineConfig
from dflash_engine.errors import EngineDead, EngineError
from dflash_engine.request import Chunk, Priority, Request
from dflash_engine.stats import EngineStats
from pipelines.desk_actor import DeskPort
from pipelines.engines import Engine, EngineFactory, open_engine
from pipelines.service.engine_client import EngineClient
from pipelines.service.serving_config import ServingConfig
from pipelines.shard_desk import ServedEngine
from pipelines.shard_puller import ShardPuller
from pipelines.starting import end_process

# All streams of a replica together; above that, pieces that are ready wait for each other. (One process
# sends some thousand Serve messages a second, and has other things to do.)
MESSAGES_PER_S = 1_000
# What clients are still told by a replica whose engine is dead.
LAST_WORDS_S = 1.0

logger = logging.getLogger(__name__)


class ReplicaEngine(Engine, EngineClient, Protocol):
    """What a replica needs of `AsyncEngine`; `FakeEngine` has it too."""

    async def close(self) -> None: ...


class AnswerMessage(NamedTuple):
    """Pieces of an answer that were ready together, and the error that ends it, if one does."""

    chunks: tuple[Chunk, ...]
    error: EngineError | None = None


class EngineReplica:
    """An engine, loaded where it is made, which must be on the event loop that calls it.

    Raises `ConfigError`.
    """

    def __init__(
        self,
        config: ServingConfig,
        served: Callable[[str], ServedEngine],
        replica: str,
        open_desk: Callable[[], DeskPort],
        *,
        factory: EngineFactory = open_engine,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self._config = config
        self._replica = replica
        self._end = end
        self._engine = cast(ReplicaEngine, factory(config.engine))
        self._served = served(self._engine.fingerprint)
        self._at_once = config.engine.limit("max_num_seqs", "cuda" if self._served.use_gpu else "cpu")
        self._online = 0
        self._open = 0
        self._dead: EngineDead | None = None
        self._puller = ShardPuller(open_desk, replica, self._engine, self._served, self._room)
        self._pulling = asyncio.get_running_loop().create_task(self._puller.run())

    async def served(self) -> ServedEngine:
        """What this replica has."""
        return self._served

    async def stats(self) -> EngineStats:
        """The engine's own counters, those of batch rows included."""
        return self._engine.stats()

    async def named_stats(self) -> tuple[str, EngineStats]:
        """Under this replica's name, which no later one has."""
        return self._replica, self._engine.stats()

    async def answer(self, request: Request) -> AsyncGenerator[AnswerMessage, None]:
        """The answer in messages, the last one with a result or an error. Left early, the request ends."""
        ready: list[Chunk] = []
        errors: list[EngineError] = []
        arrived = asyncio.Event()
        online = request.priority == Priority.ONLINE
        self._open += 1
        self._online += online
        collecting = asyncio.create_task(self._collect(request, ready, errors, arrived))
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                chunks = tuple(ready)
                ready.clear()
                error = errors[0] if errors else None
                yield AnswerMessage(chunks, error)
                if error is not None or chunks[-1].result is not None:
                    break
                await asyncio.sleep(self._open / MESSAGES_PER_S)
        finally:
            collecting.cancel()
            self._open -= 1
            self._online -= online
            self._puller.wake()
            await asyncio.gather(collecting, return_exceptions=True)

    async def check_health(self) -> None:
        """Raises `EngineDead` where the engine answers nothing any more; one that is stuck ends the process,
        for nothing in it can be ended otherwise."""
        health = self._engine.health()
        if self._dead is not None or not health.alive:
            raise EngineDead("the engine is dead")
        if health.stalled_s > self._config.service.stall_limit_s:
            self._end(f"the engine is stuck: no round has ended for {health.stalled_s:.0f} s")

    async def close(self) -> None:
        """Give back what batch jobs have here, and end the engine."""
        self._pulling.cancel()
        await asyncio.gather(self._pulling, return_exceptions=True)
        await self._puller.stop()
        await self._engine.close()

    def _room(self) -> int:
        """Shards that there is slack for: none while online requests fill the engine."""
        if self._dead is not None or self._online >= self._at_once:
            return 0
        return self._config.replicas.shards_in_flight

    async def _collect(
        self, request: Request, ready: list[Chunk], errors: list[EngineError], arrived: asyncio.Event
    ) -> None:
        finished = False
        try:
            async for chunk in self._engine.submit(request):
                finished = chunk.result is not None
                ready.append(chunk)
                arrived.set()
            if not finished:
                raise EngineDead("the answer ended without a result")
        except EngineDead as error:
            errors.append(error)
            self._die(error)
        except EngineError as error:
            errors.append(error)
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            errors.append(EngineError(f"{type(error).__name__}: {error}"))
        arrived.set()

    def _die(self, error: EngineDead) -> None:
        """Serve starts another one, sooner than its health check would have it replaced."""
        if self._dead is None:
            self._dead = error
            reason = f"the engine died: {error}"
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._end, reason)


def with_threads(engine: EngineConfig, engines_here: int) -> EngineConfig:
    """On a CPU, threads are set here: Ray tells libraries to use no more than the actor's CPUs."""
    if engine.threads is not None:
        return engine
    return engine.model_copy(update={"threads": max(1, len(os.sched_getaffinity(0)) // engines_here)})
