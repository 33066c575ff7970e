"""What is known of a request is told once, and before its client can know that it is over."""

from __future__ import annotations

import asyncio

import pytest

from pipelines.service.observation import Observed
from pipelines.service.request_ids import RequestIds

START = {"type": "http.response.start", "status": 200, "headers": []}


def observe(*messages, error=None):
    """Order of what an application sends and what is told of it."""
    log = []

    async def app(scope, receive, send):
        for message in messages:
            await send(dict(message))
        if error is not None:
            raise error

    async def send(message):
        log.append(message.get("body", b"start"))

    stack = RequestIds(Observed(app, lambda seen: log.append(seen.status)))
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    try:
        asyncio.run(stack(scope, None, send))
    except ValueError as raised:
        log.append(raised)
    return log


def test_it_is_told_before_the_last_byte():
    first, last = ({"type": "http.response.body", "body": b, "more_body": b == b"1"} for b in (b"1", b"2"))
    assert observe(START, first, last) == [b"start", b"1", 200, b"2"]


def test_a_client_that_goes_before_the_answer_is_a_499():
    assert observe() == [499]


@pytest.mark.parametrize(("sent", "status"), [((), 500), ((START,), 200)])
def test_an_error_passes_through_and_is_told(sent, status):
    error = ValueError("x")
    assert observe(*sent, error=error)[len(sent) :] == [status, error]
