"""The choices of one call through the engine together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from dflash_engine.errors import EngineDead
from dflash_engine.request import Chunk, Priority, Request, SamplingParams
from pipelines.service.engine_client import EngineClient


class Piece(NamedTuple):
    """What is new of one choice."""

    choice: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Call:
    """Prompts, and how many choices of each; choices are numbered prompt by prompt."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    num_choices: int = 1

    def requests(self, request_id: str, priority: Priority, cache_salt: str = "") -> list[Request]:
        """One request for each choice, each with a seed of its own."""
        base = self.sampling.seed if self.sampling.seed is not None else secrets.randbits(63)
        return [
            Request(
                token_ids=prompt,
                sampling=self.sampling.model_copy(update={"seed": choice_seed(base, choice)}),
                request_id=f"{request_id}-{number * self.num_choices + choice}",
                priority=priority,
                cache_salt=cache_salt,
            )
            for number, prompt in enumerate(self.prompts)
            for choice in range(self.num_choices)
        ]


def choice_seed(seed: int, choice: int) -> int:
    """The first choice has the seed itself, and so is the answer that `n = 1` gives."""
    if choice == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()) >> 1


@asynccontextmanager
async def generation(
    engine: EngineClient, requests: Sequence[Request]
) -> AsyncGenerator[AsyncIterator[Piece], None]:
    """Pieces of all choices as they come, until each has its result. Raises what `submit` raises.

    Leaving it ends the choices that are still running.
    """
    pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    running = {index: request.request_id or "" for index, request in enumerate(requests)}

    async def pump(index: int, request: Request) -> None:
        try:
            async for chunk in engine.submit(request):
                if chunk.result is not None:
                    del running[index]
                pieces.put_nowait(Piece(index, chunk))
            if index in running:
                raise EngineDead("the answer ended without a result")
        except Exception as error:
            running.pop(index, None)
            pieces.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
    try:
        yield _until_results(pieces, len(requests))
    finally:
        for request_id in list(running.values()):
            with suppress(EngineDead):  # then it has ended already
                engine.abort(request_id)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_results(
    pieces: asyncio.Queue[Piece | Exception], num_left: int
) -> AsyncGenerator[Piece, None]:
    while num_left:
        piece = await pieces.get()
        if isinstance(piece, Exception):
            raise piece
        num_left -= piece.chunk.result is not None
        yield piece
