"""Where shards of batch jobs wait for the engines of a running service, and receipts for the jobs.

A Ray actor of its own (`pipelines.desk_actor`), one for each service. Jobs offer and replicas take, so that
nothing of a job ever stands in Serve's queues. Whoever is silent for too long is gone: what a replica had
taken is offered again, what a job had offered is dropped. Every message may come twice.

    offer (a job waits) -> take (a replica has slack) -> finish -> the job has its receipt
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dflash_engine.config import EngineConfig

SILENT_S = 15.0
"""Replicas and jobs are heard of every few seconds (`BEAT_S`, `ASK_S`), unless their process is gone."""
BEAT_S = 2.0
"""How often a replica says that it lives, and hears which of its shards nobody wants any more."""
ASK_S = 5.0
"""How long one message waits for a shard or a receipt."""


class ShardKey(NamedTuple):
    """A shard of a run of a job."""

    run: str
    shard_id: str


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """What a replica has, and what decides its answers."""

    config: EngineConfig
    fingerprint: str
    use_gpu: bool
    most_replicas: int
    """The service may grow to so many."""
    shards_in_flight: int
    """Shards that one replica works on at once, at most."""

    @property
    def most_shards(self) -> int:
        return self.most_replicas * self.shards_in_flight


@dataclass(frozen=True, slots=True)
class ShardOffer:
    """A shard to do. Its row of the dataset and the run's `GenerateSpec` stay in Ray's object store: both
    are lists with one reference, which Ray would otherwise fetch on the way."""

    key: ShardKey
    fingerprint: str
    """Of the engines that may do it."""
    spec: Sequence[Any]
    shard: Sequence[Any]


@dataclass(frozen=True, slots=True)
class DeskView:
    """What a job may know of the service before it starts."""

    engines: tuple[ServedEngine, ...]
    """One for each replica that is heard of."""
    draining: bool


@dataclass(slots=True)
class _Replica:
    engine: ServedEngine
    heard_s: float


@dataclass(slots=True)
class _Shard:
    offer: ShardOffer
    asked_s: float
    taker: str | None = None
    receipt: dict[str, Any] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class ShardDesk:
    """Its methods are the messages; all of them run on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._shards: dict[ShardKey, _Shard] = {}
        self._draining = False
        self._heard_s = clock()
        self._changed = asyncio.Condition()

    async def view(self) -> DeskView:
        await self._sweep()
        return DeskView(tuple(replica.engine for replica in self._replicas.values()), self._draining)

    async def offer(self, offer: ShardOffer, wait_s: float) -> dict[str, Any] | float:
        """The receipt, as soon as there is one within `wait_s`; else for how long no replica was heard of.

        A job offers again until it has the receipt: that is how it is known to live.
        """
        await self._sweep()
        shard = self._shards.get(offer.key)
        if shard is None:
            shard = self._shards[offer.key] = _Shard(offer, self._clock())
            await self._tell()
        shard.asked_s = self._clock()
        await _within(shard.done.wait(), wait_s)
        shard.asked_s = self._clock()
        if shard.receipt is None:
            return 0.0 if self._replicas else self._clock() - self._heard_s
        return shard.receipt

    async def close_run(self, run: str) -> None:
        """A run of a job has ended: what of it is still here is no longer wanted."""
        self._shards = {key: shard for key, shard in self._shards.items() if key.run != run}

    async def take(self, replica: str, most: int, wait_s: float) -> list[ShardOffer]:
        """Shards for a replica that has slack, oldest first, as soon as there are any within `wait_s`."""
        await self._sweep()
        await _within(self._until_offered(replica), wait_s)
        taken = self._open_to(replica)[:most]
        for shard in taken:
            shard.taker = replica
        return [shard.offer for shard in taken]

    async def beat(self, replica: str, engine: ServedEngine, keys: Sequence[ShardKey]) -> list[ShardKey]:
        """A replica lives and works on these; which of them it need not do any more. The first one makes it
        known."""
        self._heard_s = self._clock()
        self._replicas[replica] = _Replica(engine, self._heard_s)
        await self._sweep()
        return [key for key in keys if key not in self._shards or self._shards[key].taker != replica]

    async def finish(self, key: ShardKey, receipt: dict[str, Any]) -> None:
        """A shard is done, whoever was thought to be at it."""
        shard = self._shards.get(key)
        if shard is not None:
            shard.receipt = receipt
            shard.done.set()

    async def give_back(self, replica: str, keys: Sequence[ShardKey]) -> None:
        """A replica does not do these; another one may."""
        for key in keys:
            shard = self._shards.get(key)
            if shard is not None and shard.taker == replica:
                shard.taker = None
        await self._tell()

    async def leave(self, replica: str) -> None:
        """A replica ends on purpose."""
        self._replicas.pop(replica, None)
        await self._release({replica})

    async def drain(self) -> None:
        """Nothing is taken any more: the service ends."""
        self._draining = True

    def _open_to(self, replica: str) -> list[_Shard]:
        known = self._replicas.get(replica)
        if known is None or self._draining:
            return []
        return [
            shard
            for shard in self._shards.values()
            if shard.taker is None
            and shard.receipt is None
            and shard.offer.fingerprint == known.engine.fingerprint
        ]

    async def _until_offered(self, replica: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._open_to(replica))

    async def _sweep(self) -> None:
        """Forget who is silent."""
        before_s = self._clock() - SILENT_S
        gone = {name for name, replica in self._replicas.items() if replica.heard_s < before_s}
        for name in gone:
            del self._replicas[name]
        self._shards = {key: shard for key, shard in self._shards.items() if shard.asked_s >= before_s}
        await self._release(gone)

    async def _release(self, replicas: set[str]) -> None:
        """Offer again what these had taken."""
        held = [shard for shard in self._shards.values() if shard.taker in replicas and not shard.receipt]
        for shard in held:
            shard.taker = None
        if held:
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _within(waiting: Awaitable[object], wait_s: float) -> None:
    """Awaits it for at most so long."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(waiting, wait_s)
