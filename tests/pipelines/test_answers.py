"""In which order rows go to an engine, which of them are computed, and what comes back."""

from __future__ import annotations

import asyncio

from dflash_engine.config import EngineConfig
from dflash_engine.fake import FakeEngine
from dflash_engine.request import Request, Result, SamplingParams
from pipelines.answers import Answer, Answerer
from pipelines.rows import InputRow, RowError


class Listener(FakeEngine):
    def __init__(self) -> None:
        super().__init__(EngineConfig(model="fake"))
        self.asked: list[str | None] = []

    async def generate(self, request: Request) -> Result:
        self.asked.append(request.text)
        return await super().generate(request)


def rows(*texts: str) -> list[InputRow]:
    made = [
        InputRow(row_id=f"f:{at}", offset=at, raw=b"", request=Request(text=text, sampling=SamplingParams()))
        for at, text in enumerate(texts)
    ]
    return [*made, InputRow(row_id="f:bad", offset=99, raw=b"", error=RowError("invalid_json", "no"))]


def answered(engine: Listener, given: list[InputRow], *, dedupe: bool = False) -> list[Answer]:
    return asyncio.run(Answerer(engine, 1, 0, 1, dedupe=dedupe).answer_all(given))


def test_rows_that_begin_alike_are_asked_one_after_the_other_and_answers_keep_the_rows_order() -> None:
    engine = Listener()
    given = rows("b one", "a one", "b two", "a two")
    answers = answered(engine, given)
    assert engine.asked == ["a one", "a two", "b one", "b two"]
    alone = [answered(Listener(), [row])[0] for row in given]
    texts = [answer.text if isinstance(answer, Result) else answer.code for answer in answers]
    assert texts == [answer.text if isinstance(answer, Result) else answer.code for answer in alone]
    assert texts[-1] == "invalid_json"


def test_the_same_request_is_asked_once_where_that_is_wanted_and_its_copies_took_no_time() -> None:
    given = rows("x", "y", "x", "x")
    plain, engine = Listener(), Listener()
    expected, answers = answered(plain, given), answered(engine, given, dedupe=True)
    assert sorted(map(str, plain.asked)) == ["x", "x", "x", "y"] and sorted(map(str, engine.asked)) == [
        "x",
        "y",
    ]
    results = [answer for answer in answers if isinstance(answer, Result)]
    assert [each.text for each in results] == [each.text for each in expected if isinstance(each, Result)]
    assert [bool(each.usage.busy_ns) for each in results] == [True, True, False, False]
