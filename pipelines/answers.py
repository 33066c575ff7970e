"""Rows to answers: what one engine makes of them, whatever goes wrong with a row."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from dflash_engine.errors import EngineDead, RequestError
from dflash_engine.request import Request, Result
from pipelines.dedupe import group
from pipelines.engines import Engine
from pipelines.prefix_order import prefix_order
from pipelines.rows import InputRow, RowError, seed_for

Answer = Result | RowError

logger = logging.getLogger(__name__)


class Answerer:
    """Puts rows of several parts into one engine, at most `slots` at once, in the order that parts come; of
    one part, those that begin alike one after the other.

    With `dedupe`, rows of a part that are the same by rule are computed once.
    """

    def __init__(
        self, engine: Engine, slots: int, job_seed: int, tries: int, *, dedupe: bool = False
    ) -> None:
        self._engine = engine
        self._most = slots
        self._slots = asyncio.Semaphore(slots)
        self._job_seed = job_seed
        self._tries = tries
        self._dedupe = dedupe

    async def answer_all(self, rows: Sequence[InputRow]) -> list[Answer]:
        """The answers in the order of the rows. Raises `EngineDead`, and nothing else."""
        answers: list[Answer | None] = [row.error for row in rows]
        source = group(rows) if self._dedupe else range(len(rows))
        left = iter([at for at in prefix_order(rows) if rows[at].error is None and source[at] == at])

        async def take() -> None:
            # A slot is kept from row to row: taking it for each would cost as much as the rest of this path.
            async with self._slots:
                for number in left:
                    answers[number] = await self._answer(rows[number])

        await asyncio.gather(*(take() for _ in range(min(len(rows), self._most))))
        for number, computed in enumerate(source):
            if answers[number] is None:
                answers[number] = _copied(answers[computed])
        return [answer for answer in answers if answer is not None]

    async def _answer(self, row: InputRow) -> Answer:
        assert row.request is not None
        try:
            result = await self._generate(self._seeded(row.request, row.row_id))
        except RequestError as error:
            return RowError(error.code, str(error))
        except EngineDead:
            raise
        except Exception as error:
            tries = f" ({self._tries} tries)" if self._tries > 1 else ""
            return RowError("internal_error", f"{type(error).__name__}: {error}{tries}")
        return result if result.error is None else RowError(result.error.code, str(result.error))

    async def _generate(self, request: Request) -> Result:
        """Raises what the last of the tries raised."""
        for number in range(1, self._tries + 1):
            try:
                return await self._engine.generate(request)
            except (RequestError, EngineDead):
                raise
            except Exception:
                logger.exception("row %s failed, try %d of %d", request.request_id, number, self._tries)
                if number == self._tries:
                    raise
        raise AssertionError("a row is tried at least once")

    def _seeded(self, request: Request, row_id: str) -> Request:
        # A greedy choice has no noise: such rows share their parameters.
        if request.sampling.greedy or request.sampling.seed is not None:
            return request
        seed = seed_for(self._job_seed, row_id)
        return replace(request, sampling=request.sampling.model_copy(update={"seed": seed}))


def _copied(answer: Answer | None) -> Answer | None:
    """An answer that was computed for another row: nothing was spent on it."""
    if not isinstance(answer, Result):
        return answer
    usage = replace(answer.usage, busy_ns=0, cached_tokens=answer.usage.prompt_tokens)
    return replace(answer, usage=usage)
