"""Rates of the last seconds, and what things cost so far."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest

from dflash_engine.stats import EngineStats
from pipelines.cost import Price
from pipelines.service.engine_figures import EngineFigures
from pipelines.service.live import Live
from tests.pipelines.service.scripted import world

PRICE = Price("H200", Decimal("3.60"), "2026-01-01", "test")


def looks(*moments, price=None):
    """What `Live` says at each moment (seconds, stats)."""
    at = [0.0]
    stats = [EngineStats()]

    async def source():
        return {"0": stats[0]}

    async def scenario():
        live = Live("m", EngineFigures(source, lambda: at[0]), price, lambda: at[0])
        said = []
        for at[0], stats[0] in moments:
            said.append(await live.now())
        return said

    return asyncio.run(scenario())


def test_tokens_per_second_are_those_between_looks_of_the_last_ten_seconds():
    said = looks(
        (0, EngineStats(completion_tokens=1000)),
        (2, EngineStats(completion_tokens=1400)),
        (4, EngineStats(completion_tokens=1600)),
        (11, EngineStats(completion_tokens=1600)),
        (100, EngineStats(completion_tokens=9999)),
    )
    # At 11 s the look at 0 s is too old, and the one at 2 s is the first.
    assert [one["tokens_per_s"] for one in said] == [None, 200, 150, pytest.approx(200 / 9), None]


def test_acceptance_is_that_of_the_window_and_of_all_time_where_nothing_was_drafted():
    said = looks(
        (0, EngineStats(drafts=10, accepted_tokens=10)),
        (2, EngineStats(drafts=20, accepted_tokens=40)),
        (50, EngineStats(drafts=20, accepted_tokens=40)),
    )
    assert [one["acceptance_length"] for one in said] == [2, 4, 3]
    assert looks((0, EngineStats(completion_tokens=5)))[0]["acceptance_length"] is None


def test_the_cost_is_busy_time_at_the_price_and_unknown_without_one():
    stats = EngineStats(busy_ns=500 * 10**9)
    assert looks((0, stats), price=PRICE)[0]["cost_usd"] == 0.5
    assert looks((0, stats))[0]["cost_usd"] is None


def test_the_service_tells_what_runs_now():
    with world(hold_at=1) as here:
        body = {"model": "echo-1", "messages": [{"role": "user", "content": "x"}], "stream": True}
        assert here.http.get("/live").json()["running"] == 0
        with here.http.stream("POST", "/v1/chat/completions", json=body):
            assert here.engine.holding.wait(20)
            # Figures of one second ago may still be told.
            while here.http.get("/live").json()["running"] != 1:
                pass
