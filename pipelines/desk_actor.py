"""The desk of a service as a Ray actor: how replicas open it and jobs find it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from pipelines.shard_desk import DeskView, ServedEngine, ShardDesk, ShardKey, ShardOffer

NAMESPACE = "dflash"
PREFIX = "shard-desk:"
# Each shard that is offered holds a call.
CALLS_AT_ONCE = 100_000
VIEW_S = 30.0


class DeskPort(Protocol):
    """What replicas and couriers ask and tell; `ShardDesk` says what it means."""

    async def offer(self, offer: ShardOffer, wait_s: float) -> dict[str, Any] | float: ...
    async def take(self, replica: str, most: int, wait_s: float) -> list[ShardOffer]: ...
    async def beat(self, replica: str, engine: ServedEngine, keys: Sequence[ShardKey]) -> list[ShardKey]: ...
    async def finish(self, key: ShardKey, receipt: dict[str, Any]) -> None: ...
    async def give_back(self, replica: str, keys: Sequence[ShardKey]) -> None: ...
    async def leave(self, replica: str) -> None: ...


class RemoteDesk:
    """A `DeskPort` to the actor of a service; it goes along to the couriers."""

    def __init__(self, service: str, handle: Any) -> None:
        self.service = service
        self._handle = handle

    async def offer(self, offer: ShardOffer, wait_s: float) -> dict[str, Any] | float:
        told: dict[str, Any] | float = await self._handle.offer.remote(offer, wait_s)
        return told

    async def take(self, replica: str, most: int, wait_s: float) -> list[ShardOffer]:
        offers: list[ShardOffer] = await self._handle.take.remote(replica, most, wait_s)
        return offers

    async def beat(self, replica: str, engine: ServedEngine, keys: Sequence[ShardKey]) -> list[ShardKey]:
        unwanted: list[ShardKey] = await self._handle.beat.remote(replica, engine, keys)
        return unwanted

    async def finish(self, key: ShardKey, receipt: dict[str, Any]) -> None:
        await self._handle.finish.remote(key, receipt)

    async def give_back(self, replica: str, keys: Sequence[ShardKey]) -> None:
        await self._handle.give_back.remote(replica, keys)

    async def leave(self, replica: str) -> None:
        await self._handle.leave.remote(replica)

    def view(self) -> DeskView:
        """For drivers, which have no event loop. Raises `RayError`."""
        seen: DeskView = ray.get(self._handle.view.remote(), timeout=VIEW_S)
        return seen

    def drain(self) -> None:
        """For drivers; it does not wait."""
        self._handle.drain.remote()

    def close_run(self, run: str) -> None:
        """For drivers; it does not wait."""
        self._handle.close_run.remote(run)

    def end(self) -> None:
        """For the driver that ends the service."""
        ray.kill(self._handle)


def open_desk(service: str) -> RemoteDesk:
    """The desk of a service, made by whichever replica comes first; it outlives them."""
    handle: Any = (
        ray.remote(ShardDesk)
        .options(
            name=f"{PREFIX}{service}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=CALLS_AT_ONCE,
        )
        .remote()
    )
    return RemoteDesk(service, handle)


def find_desks() -> list[tuple[RemoteDesk, DeskView]]:
    """The desks of all services of this cluster that have an engine, by the services' names."""
    actors: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    names = sorted(
        actor["name"]
        for actor in actors
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(PREFIX)
    )
    found = []
    for name in names:
        # It may end at this moment.
        with contextlib.suppress(ValueError, RayError):
            desk = RemoteDesk(name.removeprefix(PREFIX), ray.get_actor(name, namespace=NAMESPACE))
            view = desk.view()
            if view.engines and not view.draining:
                found.append((desk, view))
    return found
