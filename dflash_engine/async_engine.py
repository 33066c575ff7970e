"""The engine for many callers at once: one thread steps, an event loop awaits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore, Prepared
from dflash_engine.errors import EngineDead
from dflash_engine.health import EngineHealth, Heartbeat
from dflash_engine.heap import freeze_heap, thaw_heap
from dflash_engine.request import Chunk, Request, Result
from dflash_engine.stats import EngineStats

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Caller:
    """Where the pieces of one answer go."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Chunk | EngineDead]
    request_id: str
    seq_id: int | None = None

    def put(self, item: Chunk | EngineDead) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop has been closed: nobody is waiting
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """Continuous batching over everything submitted. Raises `ConfigError` where it cannot start."""

    def __init__(self, config: EngineConfig) -> None:
        self._core = EngineCore(config)
        self.fingerprint = self._core.fingerprint
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._callers: dict[int, _Caller] = {}
        self._closing = False
        self._dead: EngineDead | None = None
        self._num_submitted = 0
        self._heartbeat = Heartbeat()
        freeze_heap()
        self._thread = threading.Thread(target=self._serve, name="dflash-engine", daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Pieces of the answer; the last one carries the result.

        Raises `RequestError` where the request cannot be answered, and `EngineDead`. A caller that stops
        iterating ends its request within one step.
        """
        if request.sampling.grammar is None:
            prepared = self._core.prepare(request)
        else:  # compiling one may take a second, for which the others' loop must not stand still
            prepared = await asyncio.to_thread(self._core.prepare, request)
        self._num_submitted += 1
        request_id = request.request_id or f"request-{self._num_submitted}"
        caller = _Caller(asyncio.get_running_loop(), asyncio.Queue(), request_id)
        self._tell(lambda: self._admit(caller, prepared))
        finished = False
        try:
            while not finished:
                item = await caller.queue.get()
                if isinstance(item, EngineDead):
                    finished = True
                    raise EngineDead(*item.args) from item.__cause__
                finished = item.result is not None
                yield item
        finally:
            if not finished:
                with contextlib.suppress(EngineDead):  # then the request has ended already
                    self._tell(lambda: self._abort(caller))

    async def generate(self, request: Request) -> Result:
        """The whole answer. Raises as `submit` does."""
        async for chunk in self.submit(request):
            if chunk.result is not None:
                return chunk.result
        raise EngineDead("the answer ended without a result")

    def abort(self, request_id: str) -> None:
        """Ends the requests of this id within one step; their result says `abort`."""

        def find() -> None:
            for caller in list(self._callers.values()):
                if caller.request_id == request_id:
                    self._abort(caller)

        self._tell(find)

    def stats(self) -> EngineStats:
        return self._core.stats()

    def health(self) -> EngineHealth:
        """Waits for nothing, so that a stuck round is seen too."""
        alive = self._dead is None and not self._closing and self._thread.is_alive()
        return EngineHealth(alive, self._heartbeat.stalled_s())

    async def close(self) -> None:
        """Ends the thread after its step; requests still running get `EngineDead`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        thaw_heap()

    def _tell(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._dead is not None or self._closing:
                raise EngineDead(*(self._dead.args if self._dead else ("the engine is closed",)))
            self._inbox.append(command)
            self._wake.notify()

    def _serve(self) -> None:
        """The engine's thread: commands between steps, steps while there is work."""
        error = EngineDead("the engine was closed")
        try:
            while True:
                with self._wake:
                    if not (self._inbox or self._closing or self._core.has_work):
                        self._heartbeat.rest()
                        self._wake.wait_for(lambda: self._inbox or self._closing)
                    self._heartbeat.beat()
                    commands, closing = list(self._inbox), self._closing
                    self._inbox.clear()
                if closing:
                    break
                for command in commands:
                    command()
                for seq_id, chunk in self._core.step():
                    self._deliver(seq_id, chunk)
        except Exception as cause:
            logger.exception("a step failed")
            error = EngineDead(f"a step failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        with self._wake:
            self._dead = error
        for caller in self._callers.values():
            caller.put(error)

    def _admit(self, caller: _Caller, prepared: Prepared) -> None:
        caller.seq_id = self._core.add(prepared)
        self._callers[caller.seq_id] = caller

    def _abort(self, caller: _Caller) -> None:
        if caller.seq_id is not None and (chunk := self._core.abort(caller.seq_id)) is not None:
            self._deliver(caller.seq_id, chunk)

    def _deliver(self, seq_id: int, chunk: Chunk) -> None:
        caller = self._callers[seq_id]
        if chunk.result is not None:
            del self._callers[seq_id]
        caller.put(chunk)
