"""What all routes share: who asks, whether there is room, and the way through the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import Request as HttpRequest

from dflash_engine.errors import EngineDead
from dflash_engine.request import Result, Usage
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_client import EngineClient, ServedModel
from pipelines.service.errors import ApiError, ContextExceeded, queue_full
from pipelines.service.generation import Call, Piece, generation
from pipelines.service.keys import ANYONE, KeyRing, Owner
from pipelines.service.limits import Limits
from pipelines.service.observation import observed
from pipelines.service.own_origin import is_own_page
from pipelines.service.usage_record import UsageRecord

logger = logging.getLogger(__name__)


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
        owner = self._owner(http)
        observed(http).owner = owner.name
        return owner

    def _owner(self, http: HttpRequest) -> Owner:
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
        if self.config.shows_page and is_own_page(http):
            return
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
        requests = call.requests(request_id, owner.priority, owner.cache_salt)
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
        """False while shutting down, while the engine is stuck, and from its death until it answers again."""
        if self._draining or self._engine_failed:
            return False
        health = self.engine.health()
        return health.alive and health.stalled_s <= self.config.stall_limit_s


class _Visit:
    """One call's stay; counts what each choice used, also of those that never end."""

    def __init__(self, owner: Owner, request_id: str, prompt_tokens: list[int]) -> None:
        self.owner = owner
        self.left = False
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._sent = [0] * len(prompt_tokens)
        self._began_s = time.monotonic()
        self._ttfts_s: dict[int, float] = {}
        self._results: dict[int, tuple[Result, float]] = {}

    def count(self, piece: Piece) -> None:
        choice, chunk = piece
        if chunk.tokens and not self._sent[choice]:
            self._ttfts_s[choice] = time.monotonic() - self._began_s
        self._sent[choice] += len(chunk.tokens)
        if chunk.result is not None:
            self._results[choice] = chunk.result, time.monotonic() - self._began_s

    def records(self) -> list[UsageRecord]:
        return [self._record(index) for index in range(len(self._sent))]

    def _record(self, index: int) -> UsageRecord:
        result, duration_s = self._results.get(index, (None, time.monotonic() - self._began_s))
        return UsageRecord(
            self.owner.name,
            f"{self._request_id}-{index}",
            Usage(prompt_tokens=self._prompt_tokens[index], completion_tokens=self._sent[index])
            if result is None
            else result.usage,
            finished=result is not None,
            finish_reason="abort" if result is None else result.finish_reason,
            duration_s=duration_s,
            ttft_s=self._ttfts_s.get(index),
        )
