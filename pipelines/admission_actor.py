"""The admission of a run as a Ray actor, and what its engines see of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines.admission import Admission, FailedStarts, Refusal, Start
from pipelines.attempts import Attempts, Rows
from pipelines.errors import JobError
from pipelines.totals import Totals
from pipelines.write import Part, PartWriter

# A part that waits for the budget holds one; what its neighbours have to say must still get through.
CALLS_AT_ONCE = 100_000


class AdmissionPort(Protocol):
    """What an actor asks and tells; `Admission` says what it means."""

    async def look(self, part: Part) -> Attempts: ...
    async def admit(self, part: Part, rows: int) -> Refusal | None: ...
    async def trying(self, part: Part, rows: Rows) -> None: ...
    async def dying(self, parts: Sequence[Part], reason: str) -> None: ...
    async def give_back(self, part: Part) -> None: ...
    async def end(self, part: Part, totals: Totals) -> None: ...
    async def starting(self, start: Start) -> FailedStarts: ...
    async def start_failed(self, actor: str) -> int: ...
    async def started(self, actor: str) -> None: ...
    async def refuse(self, message: str, exit_code: int) -> None: ...


class RemoteAdmission:
    """An `AdmissionPort` to the actor; it goes along to the engines."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def look(self, part: Part) -> Attempts:
        found: Attempts = await self._handle.look.remote(part)
        return found

    async def admit(self, part: Part, rows: int) -> Refusal | None:
        refusal: Refusal | None = await self._handle.admit.remote(part, rows)
        return refusal

    async def trying(self, part: Part, rows: Rows) -> None:
        await self._handle.trying.remote(part, rows)

    async def dying(self, parts: Sequence[Part], reason: str) -> None:
        await self._handle.dying.remote(parts, reason)

    async def give_back(self, part: Part) -> None:
        await self._handle.give_back.remote(part)

    async def end(self, part: Part, totals: Totals) -> None:
        await self._handle.end.remote(part, totals)

    async def starting(self, start: Start) -> FailedStarts:
        failed: FailedStarts = await self._handle.starting.remote(start)
        return failed

    async def start_failed(self, actor: str) -> int:
        count: int = await self._handle.start_failed.remote(actor)
        return count

    async def started(self, actor: str) -> None:
        await self._handle.started.remote(actor)

    async def refuse(self, message: str, exit_code: int) -> None:
        await self._handle.refuse.remote(message, exit_code)

    def refuse_from_driver(self, message: str, exit_code: int) -> None:
        """`refuse` for a thread without an event loop; it does not wait."""
        self._handle.refuse.remote(message, exit_code)


@contextlib.contextmanager
def open_admission(writer: PartWriter, budget_usd: Decimal | None) -> Iterator[RemoteAdmission]:
    """The actor, on the driver's node, so that it lives as long as the job does. Raises `JobError`."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": CALLS_AT_ONCE}
    handle: Any = (
        ray.remote(Admission).options(**options, scheduling_strategy=here).remote(writer, budget_usd)
    )
    try:
        ray.get(handle.__ray_ready__.remote())
    except RayError as error:
        raise JobError(f"the parts already written cannot be read: {error}") from error
    try:
        yield RemoteAdmission(handle)
    finally:
        ray.kill(handle)
