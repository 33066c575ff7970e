"""The line of a request says who asked what for how much, and nothing that was said."""

from __future__ import annotations

import json
import logging
from decimal import Decimal

import pytest

from pipelines.cost import Price
from pipelines.service.access_log import LOGGER
from pipelines.service.keys import key_hash
from tests.pipelines.service.scripted import MODEL, world

PRICE = Price("cpu", Decimal("1"), "2026-01-01", "test")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "my secret prompt"}]}


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, LOGGER)
    return lambda: [json.loads(record.message) for record in caplog.records if record.name == LOGGER]


def test_a_line_has_the_id_that_the_client_was_told_and_what_was_used(lines, caplog, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{hash: {key_hash('sk-hidden')}, owner: search-team}}]")
    with world("my secret answer", settings={"keys": keys}, cached_tokens=3, app={"price": PRICE}) as here:
        headers = {"authorization": "Bearer sk-hidden"}
        reply = here.http.post("/v1/chat/completions", json={**CHAT, "n": 2}, headers=headers)
        used = reply.json()["usage"]
    (line,) = lines()
    assert line["request_id"] == reply.headers["x-request-id"]
    assert (line["http.route"], line["http.response.status_code"]) == ("/v1/chat/completions", 200)
    assert line["user.id"] == "search-team"
    assert line["gen_ai.operation.name"] == "chat"
    assert line["gen_ai.request.model"] == MODEL
    assert line["gen_ai.usage.output_tokens"] == used["completion_tokens"] == 2 * len("my secret answer")
    assert line["gen_ai.usage.cache_read.input_tokens"] == 6
    assert line["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert 0 < line["gen_ai.response.time_to_first_chunk"] <= line["duration_s"]
    assert line["dflash.cost_usd"] == 0
    assert "secret" not in caplog.text and "sk-hidden" not in caplog.text


def test_what_is_refused_has_a_line_without_an_owner_or_usage(lines, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{hash: {key_hash('k')}, owner: o}}]")
    with world(settings={"keys": keys}) as here:
        here.http.post("/v1/messages", json=CHAT)
        here.http.get("/nowhere")
    refused, nowhere = lines()
    assert (refused["http.response.status_code"], refused["user.id"]) == (401, None)
    assert "gen_ai.usage.output_tokens" not in refused
    assert (nowhere["http.response.status_code"], nowhere["http.route"]) == (404, "none")


def test_what_fails_inside_is_an_error(lines, caplog):
    with world(error=RuntimeError("boom")) as here:
        assert here.http.post("/v1/chat/completions", json=CHAT).status_code == 500
    (line,) = lines()
    assert line["http.response.status_code"] == 500
    assert [r.levelno for r in caplog.records if r.name == LOGGER] == [logging.ERROR]
