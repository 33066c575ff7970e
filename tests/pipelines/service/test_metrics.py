"""What Prometheus is told agrees with what was asked and answered."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_engine.config import EngineConfig
from dflash_engine.fake import STEP_NS, FakeEngine
from dflash_engine.stats import EngineStats
from pipelines.cost import Price
from pipelines.service.engine_figures import EngineFigures
from pipelines.service.keys import key_hash
from tests.pipelines.service.scripted import MODEL, world

PRICE = Price("H200", Decimal("3.60"), "2026-01-01", "test")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
FILE = """
keys:
  - {{hash: {0}, owner: operator}}
  - {{hash: {1}, owner: tenant}}
"""


def figures(here, **headers):
    reply = here.http.get("/metrics", headers=headers)
    assert reply.status_code == 200, reply.text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()) if value != MODEL)): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def here():
    with world("Hello, world!", step=4, cached_tokens=2, app={"price": PRICE}) as made:
        yield made


def test_answers_are_counted_as_their_usage_says(here):
    before = figures(here)
    whole = here.http.post("/v1/chat/completions", json=CHAT).json()["usage"]
    streamed = here.http.post("/v1/messages", json={**CHAT, "max_tokens": 5, "stream": True})
    assert streamed.status_code == 200
    after = figures(here)

    def grown(*name):
        return after[name] - before.get(name, 0)

    prompt = 2 * whole["prompt_tokens"]
    assert grown("vllm:prompt_tokens_total") == grown("vllm:prefix_cache_queries_total") == prompt
    assert grown("vllm:prefix_cache_hits_total") == 4
    assert grown("vllm:generation_tokens_total") == len("Hello, world!") + 5
    assert grown("vllm:request_success_total", "stop") == 1
    assert grown("vllm:request_success_total", "length") == 1
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
        assert grown(f"vllm:{histogram}_seconds_count") == 2
    assert 0 < grown("vllm:time_to_first_token_seconds_sum") < grown("vllm:e2e_request_latency_seconds_sum")
    assert grown("dflash:http_requests_total", "POST", "/v1/messages", "200") == 1


def test_a_choice_that_a_client_left_counts_as_aborted_with_the_tokens_that_were_sent():
    with world("Hello, world!", step=4, hold_at=2) as held:
        with held.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
            for line in reply.iter_lines():
                if "o, w" in line:
                    break
        assert held.engine.any_abort.wait(20)
        assert held.engine.ended.wait(20)
        aborted = ("vllm:request_success_total", "abort")
        seen = figures(held)
        while aborted not in seen:  # bounded by the test's time limit
            seen = figures(held)
        assert seen["vllm:generation_tokens_total",] == 8


def test_paths_that_do_not_exist_are_one_route(here):
    for path in ("/a", "/b", "/v1/chat/completions/x"):
        here.http.get(path)
    seen = figures(here)
    assert seen["dflash:http_requests_total", "GET", "none", "404"] == 3
    assert not any("/a" in name for name in seen)


def test_figures_of_engines_stand_beside_each_other_with_acceptance_and_money():
    async def two():
        return {
            "one": EngineStats(running=3, drafts=10, accepted_tokens=25, busy_ns=2 * 10**9),
            "two": EngineStats(waiting=4, kv_usage=0.25),
        }

    with world(app={"engine_stats": two, "price": PRICE}) as made:
        seen = figures(made)
    assert seen["vllm:num_requests_running", "one"] == 3
    assert seen["vllm:num_requests_waiting", "two"] == 4
    assert seen["vllm:kv_cache_usage_perc", "two"] == 0.25
    assert seen["vllm:spec_decode_num_drafts_total", "one"] == 10
    assert seen["vllm:spec_decode_num_accepted_tokens_total", "one"] == 25
    assert seen["dflash:busy_seconds_total", "one"] == 2
    assert seen["dflash:usd_per_hour",] == 3.6


def test_owners_are_billed_for_the_busy_time_of_their_answers(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(FILE.format(key_hash("op"), key_hash("ten")))
    settings = {"keys": keys, "metrics_owners": ("operator",)}
    with world(settings=settings, app={"price": PRICE}) as made:
        fake = FakeEngine(EngineConfig(model="fake", draft=None))
        made.engine.submit = fake.submit
        body = {**CHAT, "max_tokens": 6, "ignore_eos": True}
        asked = made.http.post("/v1/chat/completions", json=body, headers={"x-api-key": "ten"})
        assert asked.status_code == 200, asked.text
        seen = figures(made, **{"x-api-key": "op"})
        refused = made.http.get("/metrics", headers={"x-api-key": "ten"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "metrics_not_allowed")
        assert made.http.get("/metrics").status_code == 401
    busy_s = 6 * STEP_NS / 1e9
    assert seen["dflash:owner_busy_seconds_total", "tenant"] == pytest.approx(busy_s)
    assert seen["dflash:cost_usd_total", "tenant"] == pytest.approx(busy_s * 3.6 / 3600)
    # Without a draft a pass gives one token.
    assert seen["dflash:acceptance_length_sum",] == 1


def test_two_services_in_one_process_have_figures_of_their_own(here):
    with world() as other:
        other.http.post("/v1/chat/completions", json=CHAT)
        assert figures(other)["vllm:request_success_total", "stop"] == 1


def test_engines_are_asked_at_most_once_a_second_and_counters_outlive_them():
    now = [0.0]
    answers = [{"a": EngineStats(running=1, steps=5)}, {"b": EngineStats(running=2, steps=1)}]
    asked = []

    async def source():
        asked.append(now[0])
        return answers[min(len(asked), len(answers)) - 1]

    async def scenario():
        made = EngineFigures(source, lambda: now[0])
        first = [await made.total(), await made.total()]
        now[0] = 1.0
        return [*first, await made.total()]

    one, again, later = asyncio.run(scenario())
    assert one == again == EngineStats(running=1, steps=5)
    assert asked == [0.0, 1.0]
    assert later == EngineStats(running=2, steps=6)
