"""One choice of an answer, from the engine's chunks to the parts that clients see."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dflash_engine.request import Chunk, Result
from pipelines.service.errors import ApiError
from pipelines.service.forced_calls import CallParser
from pipelines.service.generation import Piece
from pipelines.service.output import OutputParser, Part, ToolCall


class ChoiceReader:
    """Collects one choice. `result` is set once the choice has ended."""

    def __init__(self, parser: OutputParser | CallParser) -> None:
        self._parser = parser
        self.parts: list[Part] = []
        self.reasoning_tokens = 0
        self.result: Result | None = None

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def read(self, chunk: Chunk) -> list[Part]:
        """What is new. Raises `ApiError` 503 where the engine broke the answer off."""
        if self._parser.is_thinking:
            self.reasoning_tokens += len(chunk.tokens)
        parts = self._parser.push(chunk.text)
        if chunk.result is not None:
            self.result = completed(chunk.result)
            parts += self._parser.finish()
        self.parts += parts
        return parts

    @property
    def ended(self) -> Result:
        assert self.result is not None, "the choice has not ended"
        return self.result

    @property
    def has_calls(self) -> bool:
        return any(isinstance(part, ToolCall) for part in self.parts)


def completed(result: Result) -> Result:
    """The result of an answer that came to its end. Raises `RequestError` or `ApiError` 503."""
    if result.error is not None:
        raise result.error
    if result.finish_reason in ("abort", "error"):
        raise ApiError(503, "the answer was broken off; try again", code="aborted", retry_after_s=1)
    return result


async def begun(pieces: AsyncIterator[Piece]) -> tuple[Piece, AsyncIterator[Piece]]:
    """The first piece, and all of them with it: what the engine refuses is told by the status."""
    first = await anext(pieces)

    async def all_of_them() -> AsyncIterator[Piece]:
        yield first
        async for piece in pieces:
            yield piece

    return first, all_of_them()
