"""A client that goes away ends its request at once: in mid-stream, queued, or with many choices."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.pipelines.service.scripted import MODEL, open_request, world

LONG_S = 20
"""Bound of a wait for an event that comes at once."""
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
MESSAGE: Any = {**CHAT, "max_tokens": 50}
PATHS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": MODEL, "prompt": "Hi"}),
    ("/v1/messages", MESSAGE),
]


def received(sock, wanted):
    seen = b""
    while wanted not in seen:
        piece = sock.recv(4096)
        assert piece, seen
        seen += piece


@pytest.mark.parametrize(("path", "body"), PATHS, ids=[path for path, _ in PATHS])
def test_a_socket_closed_in_mid_stream_aborts_the_request(path, body):
    with world("Hello, world!", hold_at=2) as here:
        sock = open_request(here.url, path, {**body, "stream": True})
        received(sock, b"Hel")
        assert here.engine.holding.wait(LONG_S)
        assert not here.engine.any_abort.is_set()
        sock.close()
        assert here.engine.any_abort.wait(LONG_S)
        assert here.engine.ended.wait(LONG_S)
    assert list(here.engine.aborted) == [here.engine.requests[0].request_id]
    assert here.engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), PATHS, ids=[path for path, _ in PATHS])
def test_a_socket_closed_before_the_first_token_aborts_the_request(path, body, stream):
    with world("Hello, world!", hold_at=0) as here:
        sock = open_request(here.url, path, {**body, "stream": stream})
        assert here.engine.holding.wait(LONG_S)
        sock.close()
        assert here.engine.any_abort.wait(LONG_S)
        assert here.engine.ended.wait(LONG_S)
    assert here.engine.running == 0


def test_all_choices_of_a_client_that_went_are_aborted_and_their_room_is_given_back():
    records = []
    settled = threading.Event()

    def on_usage(record):
        records.append(record)
        if len(records) == 4:
            settled.set()

    with world("Hello, world!", hold_at=1, settings={"max_requests": 4}, app={"on_usage": on_usage}) as here:
        sock = open_request(here.url, "/v1/chat/completions", {**CHAT, "n": 4})
        assert here.engine.holding.wait(LONG_S)
        sock.close()
        assert settled.wait(LONG_S)
        here.engine.hold_at = None
        with open_request(here.url, "/v1/chat/completions", {**CHAT, "n": 4}) as again:
            received(again, b" 200 ")
    assert len(here.engine.aborted) == 4
    assert [record.finished for record in records] == [False] * 4 + [True] * 4


def test_an_answer_that_was_read_to_its_end_is_not_aborted():
    body = {**CHAT, "stream": True}
    with world("Hello, world!") as here, open_request(here.url, "/v1/chat/completions", body) as sock:
        received(sock, b"[DONE]")
    assert not here.engine.any_abort.is_set()
    assert not here.engine.ended.is_set()
