"""Shards of a job to the desk of a running service, and receipts back: the job's side of `pool: serve`."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError

from pipelines.desk_actor import DeskPort
from pipelines.errors import JobError
from pipelines.receipt import Receipt
from pipelines.shard_desk import ASK_S, ShardKey, ShardOffer

# A replica that is replaced loads its model anew.
NO_REPLICA_S = 900.0


class Courier:
    """Ray Data calls this with shards, many at once on one event loop; it computes nothing."""

    def __init__(self, desk: DeskPort, service: str, run: str, fingerprint: str, spec: list[Any]) -> None:
        self._desk = desk
        self._service = service
        self._run = run
        self._fingerprint = fingerprint
        self._spec = spec

    async def __call__(self, shard: dict[str, Any]) -> dict[str, Any]:
        shard_id = shard["shard_id"]
        offer = ShardOffer(ShardKey(self._run, shard_id), self._fingerprint, self._spec, [ray.put(shard)])
        while True:
            try:
                told = await self._desk.offer(offer, ASK_S)
            except RayError as error:
                return self._failure(shard_id, f"has ended ({type(error).__name__})")
            if isinstance(told, dict):
                return told
            if told >= NO_REPLICA_S:
                return self._failure(shard_id, f"has had no engine for {told:.0f} s")

    def _failure(self, shard_id: str, reason: str) -> dict[str, Any]:
        message = (
            f"service {self._service}, whose engines this job uses, {reason}: what is written stays, and "
            "the same command goes on, with pool = own without the service"
        )
        return Receipt(shard_id=shard_id, failure=message, exit_code=JobError.exit_code).as_record()
