"""What the service sees of replicas behind a handle, told by a handle without Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from dflash_engine.errors import PromptTooLong
from dflash_engine.request import Chunk, Request, Result
from dflash_engine.stats import EngineStats
from pipelines.service.engine_replica import AnswerMessage
from pipelines.service.errors import ApiError, EngineBusy
from pipelines.service.remote_engine import RemoteEngine

FIRST = Chunk("one", (1,))
LAST = Chunk("", (), Result(request_id="r", text="one"))


class Response:
    """Messages, then perhaps an error; as Serve's own, `cancel` raises what the request has ended with."""

    def __init__(self, messages: list[AnswerMessage], error: Exception | None = None, hold: bool = False):
        self._messages, self._error, self._hold = messages, error, hold
        self.cancelled = False

    async def __aiter__(self) -> AsyncGenerator[AnswerMessage, None]:
        for message in self._messages:
            yield message
        if self._hold:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self.cancelled = True
        if self._error is not None:
            raise self._error


class Handle:
    def __init__(self, response: Response) -> None:
        self._response = response

    def options(self, **options: Any) -> Handle:
        assert options == {"stream": True, "method_name": "answer"}
        return self

    def remote(self, request: Request) -> Response:
        return self._response


def engine(response: Response) -> RemoteEngine:
    return RemoteEngine(Handle(response), "f", retry_after_s=3.0)


async def answer(response: Response) -> list[Chunk]:
    return [chunk async for chunk in engine(response).submit(Request(text="a", request_id="r"))]


def test_chunks_come_out_of_their_messages_in_order_and_nothing_is_cancelled():
    response = Response([AnswerMessage((FIRST, FIRST)), AnswerMessage((LAST,))])
    assert asyncio.run(answer(response)) == [FIRST, FIRST, LAST]
    assert not response.cancelled


def test_a_full_queue_is_busy_with_the_time_to_wait():
    response = Response([], BackPressureError(num_queued_requests=1, max_queued_requests=1))
    with pytest.raises(EngineBusy) as caught:
        asyncio.run(answer(response))
    assert caught.value.retry_after_s == 3.0


def test_a_replica_that_dies_is_503_for_its_own_requests():
    with pytest.raises(ApiError) as caught:
        asyncio.run(answer(Response([AnswerMessage((FIRST,))], ActorDiedError())))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5.0)


def test_an_error_of_the_request_is_raised_as_the_engine_raised_it():
    with pytest.raises(PromptTooLong, match="too long by far"):
        asyncio.run(answer(Response([AnswerMessage((), PromptTooLong("too long by far"))])))


@pytest.mark.parametrize("ended", [None, RequestCancelledError("r")])
def test_an_answer_that_is_left_or_aborted_is_cancelled_at_its_replica(ended: Exception | None):
    async def story() -> tuple[bool, bool]:
        left = Response([AnswerMessage((FIRST,))], ended, hold=True)
        stream = engine(left).submit(Request(text="a", request_id="r"))
        assert await anext(stream) == FIRST
        await stream.aclose()
        aborted = Response([AnswerMessage((FIRST,))], ended, hold=True)
        client = engine(aborted)
        stream = client.submit(Request(text="a", request_id="r"))
        await anext(stream)
        assert client.stats().running == 1
        client.abort("nobody's")
        client.abort("r")
        await stream.aclose()
        assert client.stats().running == 0
        return left.cancelled, aborted.cancelled

    assert asyncio.run(story()) == (True, True)


class Broadcast:
    """Of replicas of which one has died."""

    def broadcast(self, name: str) -> Broadcast:
        assert name == "named_stats"
        return self

    def options(self, **options: Any) -> Broadcast:
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        if timeout_s < 1:
            raise TimeoutError
        return [("a", EngineStats(running=2)), ActorDiedError(), ("b", EngineStats(waiting=1))]


def test_figures_are_those_of_the_replicas_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    client = RemoteEngine(Broadcast(), "f", retry_after_s=3.0)
    found = asyncio.run(client.replica_stats())
    assert found == {"a": EngineStats(running=2), "b": EngineStats(waiting=1)}
    monkeypatch.setattr("pipelines.service.remote_engine.STATS_S", 0.5)
    assert asyncio.run(client.replica_stats()) == {}
