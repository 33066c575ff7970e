"""What all routes share: who asks, whether there is room, and the way through the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from dflash_engine.errors import EngineDead
from dflash_engine.request import Usage
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_client import EngineClient, ServedModel
from pipelines.service.errors import ApiError, ContextExceeded, queue_full
from pipelines.service.generation import Call, Piece, generation
from pipelines.service.keys import ANYONE, KeyRing, Owner
from pipelines.service.limits import Limits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What one choice used, for whoever writes the bill. An aborted one has the tokens that were sent."""

    owner: str
    request_id: str
    usage: Usage
    finished: bool


class Service:
    """One model behind an engine, for the owners of keys. Raises `ConfigError` for a bad key file."""

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        config: ServiceConfig,
        *,
        limits: Limits | None = None,
        on_usage: Callable[[UsageRecord], None] | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.config = config
        self._keys = KeyRing.load(config.keys) if config.keys else None
        self._limits = limits or Limits()
        self._on_usage = on_usage
        self._num_running = 0
        self._draining = False
        self._engine_failed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """From now on new requests get 503; those that run go on."""
        self._draining = True

    async def idle(self) -> None:
        """Returns once no answer is being made."""
        await self._idle.wait()

    def authenticate(self, http: HttpRequest) -> Owner:
        """The owner of the key in either header. Raises `ApiError` 401, and 403 for a strange web page."""
        if self._keys is None:
            self._check_origin(http)
            return ANYONE
        scheme, _, bearer = http.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else ""
        key = key or http.headers.get("x-api-key", "")
        if not key:
            raise ApiError(
                401,
                "no API key given: send it as Authorization: Bearer KEY, or as x-api-key",
                code="missing_api_key",
            )
        return self._keys.owner(key)

    def _check_origin(self, http: HttpRequest) -> None:
        """Without keys any page in the user's browser could make it ask: CORS hides only the answer."""
        origin = http.headers.get("origin")
        allowed = self.config.cors_origins
        if origin is not None and origin not in allowed and "*" not in allowed:
            raise ApiError(403, f"origin {origin[:200]} is not among cors_origins", code="origin_not_allowed")

    def check_model(self, name: str) -> None:
        """Raises `ApiError` 404."""
        if not self.model.is_called(name):
            raise ApiError(
                404,
                f"model {name[:200]!r} does not exist; this service has {self.model.name}",
                code="model_not_found",
                param="model",
            )

    def check_length(self, prompt: tuple[int, ...], param: str) -> None:
        """Raises `ApiError` 400 with both numbers."""
        if len(prompt) >= self.model.max_model_len:
            raise ContextExceeded(len(prompt), self.model.max_model_len, param)

    @asynccontextmanager
    async def answer(
        self, call: Call, owner: Owner, request_id: str
    ) -> AsyncGenerator[AsyncIterator[Piece], None]:
        """Pieces of the call's answer. Raises `ApiError` 429 and 503, and what the engine raises.

        Leaving it gives the room back, and ends what still runs.
        """
        requests = call.requests(request_id, owner.priority)
        self._check_room(len(requests))
        self._limits.admit(owner)
        self._num_running += len(requests)
        self._idle.clear()
        visit = _Visit(owner, request_id, [len(request.token_ids or ()) for request in requests])
        try:
            async with generation(self.engine, requests) as pieces:
                yield self._counted(pieces, visit)
        finally:
            self._leave(visit)

    async def _counted(self, pieces: AsyncIterator[Piece], visit: _Visit) -> AsyncGenerator[Piece, None]:
        try:
            async for piece in pieces:
                visit.count(piece)
                yield piece
        except EngineDead:
            logger.exception("the engine has stopped")
            self._engine_failed = True
            raise
        self._engine_failed = False
        # Before the client hears of the end, so that its next request finds the room.
        self._leave(visit)

    def _check_room(self, num_requests: int) -> None:
        if self._draining:
            raise ApiError(
                503,
                "the service is shutting down; try again",
                code="shutting_down",
                retry_after_s=self.config.retry_after_s,
            )
        if self._num_running + num_requests > self.config.max_requests:
            raise queue_full(self.config.retry_after_s)

    def _leave(self, visit: _Visit) -> None:
        """Gives the room back and writes down what was used, once."""
        if visit.left:
            return
        visit.left = True
        records = visit.records()
        self._num_running -= len(records)
        if not self._num_running:
            self._idle.set()
        used = [record.usage for record in records]
        self._limits.pay_tokens(
            visit.owner, sum(usage.prompt_tokens + usage.completion_tokens for usage in used)
        )
        if self._on_usage is not None:
            for record in records:
                self._on_usage(record)

    def healthy(self) -> bool:
        """False while shutting down, and from an engine's death until it answers again."""
        if self._draining or self._engine_failed:
            return False
        try:
            self.engine.stats()
        except EngineDead:
            return False
        return True


class _Visit:
    """One call's stay; counts what each choice used, also of those that never end."""

    def __init__(self, owner: Owner, request_id: str, prompt_tokens: list[int]) -> None:
        self.owner = owner
        self.left = False
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._sent = [0] * len(prompt_tokens)
        self._results: dict[int, Usage] = {}

    def count(self, piece: Piece) -> None:
        self._sent[piece.choice] += len(piece.chunk.tokens)
        if piece.chunk.result is not None:
            self._results[piece.choice] = piece.chunk.result.usage

    def records(self) -> list[UsageRecord]:
        return [
            UsageRecord(
                self.owner.name,
                f"{self._request_id}-{index}",
                self._results.get(index) or Usage(prompt_tokens=prompt, completion_tokens=sent),
                finished=index in self._results,
            )
            for index, (prompt, sent) in enumerate(zip(self._prompt_tokens, self._sent, strict=True))
        ]
