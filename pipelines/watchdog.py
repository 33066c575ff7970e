"""A pool none of whose actors is alive: waited for, since a cluster may grow, but not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ray
import ray.data
from ray.data._internal.execution.execution_callback import ExecutionCallback

from pipelines.cluster import num_nodes
from pipelines.errors import JobError

WHAT = {"GPU": "GPUs", "CPU": "CPU cores"}


@dataclass(frozen=True, slots=True)
class Need:
    """What one actor holds of the cluster."""

    resource: Literal["GPU", "CPU"]
    amount: int


@dataclass(frozen=True, slots=True)
class Room:
    """What there is in the cluster just now."""

    nodes: int
    alive: float
    free: float


class Watchdog(ExecutionCallback):
    """Looks at a run of Ray Data in each step of its loop and ends it with a `JobError`.

    An actor that is alive may take any time for a shard; where none is, no receipt can come either.
    """

    def __init__(
        self,
        need: Need,
        lost_after_s: float,
        clock: Callable[[], float] = time.monotonic,
        room: Callable[[Need], Room] | None = None,
    ) -> None:
        self._need = need
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._room = room or room_of_cluster
        self._alive_s = clock()

    def on_execution_step(self, executor: Any) -> None:
        """Called by Ray Data; what it raises is raised where receipts are awaited."""
        self.see(sum(operator.get_actor_info().running for operator in executor._topology))

    def see(self, alive: int) -> None:
        """So many actors are alive now. Raises `JobError` where there was none for too long."""
        now_s = self._clock()
        if alive:
            self._alive_s = now_s
        elif now_s - self._alive_s >= self._lost_after_s:
            raise JobError(self._message(self._room(self._need)))

    def _message(self, room: Room) -> str:
        need, what = self._need, WHAT[self._need.resource]
        return (
            f"no engine has been alive for {self._lost_after_s:g} s (lost_after_s): each asks for "
            f"{need.amount} of a node's {what}, and the cluster has {room.alive:g} on {room.nodes} nodes "
            f"that are alive, {room.free:g} of them free; what is written stays, and the same command goes "
            "on when there is room"
        )


def room_of_cluster(need: Need) -> Room:
    """Nodes, and what they have of a resource."""
    alive, free = (
        found.get(need.resource, 0) for found in (ray.cluster_resources(), ray.available_resources())
    )
    return Room(num_nodes(), alive, free)


def watch(receipts: ray.data.Dataset, need: Need, lost_after_s: float) -> ray.data.Dataset:
    """The same dataset, which ends with a `JobError` where no actor of it has been alive for so long."""
    # Ray Data calls it to make one for each run of the dataset.
    made = partial(Watchdog, need, lost_after_s)
    receipts.context.custom_execution_callback_classes = [made]  # type: ignore[list-item]
    return receipts
