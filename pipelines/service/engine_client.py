"""The seam to the engine: what the service asks of it, in this process or behind a handle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_engine.health import EngineHealth
from dflash_engine.request import Chunk, Request
from dflash_engine.stats import EngineStats
from pipelines.service.dialect import Dialect

Turn = Mapping[str, Any]
"""A turn as chat templates see it: role, content, and tool_calls, tool_call_id, reasoning_content."""
Tool = Mapping[str, Any]
"""A tool as chat templates see it: type function, function with name, description, parameters."""


class EngineClient(Protocol):
    """`AsyncEngine` and `FakeEngine` have all of it.

    `submit` raises `RequestError`, `EngineDead`, and `service.errors.EngineBusy` where it has a queue.
    """

    @property
    def fingerprint(self) -> str: ...
    def submit(self, request: Request) -> AsyncIterator[Chunk]: ...
    def abort(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...
    def health(self) -> EngineHealth:
        """Answers at once, also where the engine is stuck."""
        ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids; `thinking` says that the template has begun the model's thoughts."""

    tokens: tuple[int, ...]
    thinking: bool = False


class ChatTokenizer(Protocol):
    """Prompts to ids and ids to text, for one model. Used from several threads at once."""

    @property
    def dialect(self) -> Dialect: ...

    def encode_chat(
        self, turns: Sequence[Turn], tools: Sequence[Tool] = (), options: Mapping[str, Any] | None = None
    ) -> ChatPrompt:
        """Raises `BadPrompt` where the template refuses. `options` are values for the template."""
        ...

    def encode(self, text: str) -> tuple[int, ...]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of the model behind the service."""

    name: str
    max_model_len: int
    """Prompt plus answer, in tokens."""
    tokenizer: ChatTokenizer
    created_s: int
    aliases: tuple[str, ...] = ()

    def is_called(self, name: str) -> bool:
        return name == self.name or name in self.aliases
