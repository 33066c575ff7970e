"""The engine replicas behind a Serve handle, as the service sees an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from dflash_engine.health import EngineHealth
from dflash_engine.request import Chunk, Request
from dflash_engine.stats import EngineStats
from pipelines.service.errors import ApiError, EngineBusy

# A replica that was just replaced loads its model; the next one may be free at once.
REPLACED_S = 5.0
# Whoever looks at figures waits no longer for them.
STATS_S = 2.0


class RemoteEngine:
    """An `EngineClient`. One request goes to one replica, whichever Serve's router picks."""

    def __init__(self, handle: Any, fingerprint: str, retry_after_s: float) -> None:
        self.fingerprint = fingerprint
        self._handle = handle
        self._answers = handle.options(stream=True, method_name="answer")
        self._retry_after_s = retry_after_s
        self._responses: dict[str, Any] = {}

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """As `EngineClient` says. Where the replica goes away in mid-answer: `ApiError` 503."""
        response = self._answers.remote(request)
        request_id = request.request_id or ""
        self._responses[request_id] = response
        try:
            async for message in response:
                for chunk in message.chunks:
                    yield chunk
                if message.error is not None:
                    raise message.error
        except (asyncio.CancelledError, GeneratorExit):
            _cancel(response)
            raise
        except BackPressureError as error:
            raise EngineBusy(self._retry_after_s) from error
        except (RayActorError, DeploymentUnavailableError) as error:
            # Not `EngineDead`: the other replicas are well, and this one is being replaced.
            raise ApiError(
                503, "the engine has stopped; try again", code="engine_dead", retry_after_s=REPLACED_S
            ) from error
        finally:
            del self._responses[request_id]

    def abort(self, request_id: str) -> None:
        """Frees the request's room in its replica, or its place in the queue, at once."""
        if response := self._responses.get(request_id):
            _cancel(response)

    def stats(self) -> EngineStats:
        """Of this process's requests; the replicas count for themselves."""
        return EngineStats(running=len(self._responses))

    async def replica_stats(self) -> dict[str, EngineStats]:
        """Of each replica under its name, batch rows included; none where one does not answer in time."""
        asked = self._handle.broadcast("named_stats")
        try:
            found = await asked.results_async(timeout_s=STATS_S, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException):
            return {}
        return dict(each for each in found if isinstance(each, tuple))

    def health(self) -> EngineHealth:
        """Serve asks the replicas, and replaces those that are not well."""
        return EngineHealth(alive=True)


def _cancel(response: Any) -> None:
    # It raises what the request has ended with, if it has.
    with contextlib.suppress(RayError, RayServeException):
        response.cancel()
