"""The service on a real Serve: clients that go, engines that die, full queues, batch jobs in its slack."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError
from dflash_engine.fake import FakeEngine
from dflash_engine.request import Request as EngineRequest
from dflash_engine.request import SamplingParams
from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from pipelines.errors import JobRefused
from pipelines.service.config import ServiceConfig
from pipelines.service.deployment import ENGINE, application, build, listening_on
from pipelines.service.serving_config import ServingConfig
from pipelines.service.word_tokenizer import WordTokenizer
from tests.pipelines.helpers import jsonl, output_rows, prompts
from tests.pipelines.service.scripted import open_request

# Ray Data warns of its own deprecated settings when it sets their defaults.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data")]

ROOT = Path(__file__).resolve().parents[3]
LONG_S = 60.0
"""Bound of a wait for what comes soon."""
NAME = "test"
MODEL = "fake:0.01"
SEQS, AT_ONCE, QUEUED = 2, 4, 1
"""Of one engine: running, running and waiting (with the test's own question for `stats`), before it."""
HELLO: Any = [{"role": "user", "content": "Name three colours."}]
ASK: Any = {"model": MODEL, "messages": HELLO, "temperature": 0, "stream": True}
LONG: Any = {**ASK, "max_tokens": 4000, "ignore_eos": True}
"""An answer of 40 s, which no test waits for."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def config(**service: Any) -> ServingConfig:
    return ServingConfig(
        name=NAME,
        engine={"model": MODEL, "max_num_seqs": SEQS},
        service=service,
        replicas={"max_requests": AT_ONCE, "max_queued": QUEUED, "shards_in_flight": 2},
        health={"period_s": 0.5},
        drain_s=LONG_S,
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One cluster and one service for all tests of this file."""
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    port = free_port()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(application(config()), name=NAME)
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def stats() -> Any:
    """Of the one engine."""
    [found] = serve.get_deployment_handle(ENGINE, NAME).broadcast("stats").results(timeout_s=LONG_S)
    return found


def until(condition: Any) -> None:
    """Polls what another process counts and nothing tells."""
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def idle() -> bool:
    found = stats()
    return not found.running and not found.waiting


def replica_names() -> list[str]:
    """Of the actors of engines."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if f"{NAME}#{ENGINE}#" in actor["name"]]


def replica() -> Any:
    """The actor of the one engine."""
    [name] = replica_names()
    return ray.get_actor(name, namespace="serve")


def num_ongoing(actor: Any) -> int:
    """Requests that Serve counts at a replica."""
    count: int = ray.get(actor.get_num_ongoing_requests.remote())
    return count


def known_answer(max_tokens: int) -> str:
    """What the engine itself says to HELLO."""
    request = EngineRequest(
        token_ids=WordTokenizer().encode_chat(HELLO).tokens,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
    )
    return asyncio.run(FakeEngine(EngineConfig(model="fake")).generate(request)).text


def test_both_sdks_stream_what_the_engine_itself_answers(url: str):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as api:
        streamed = list(api.chat.completions.create(**ASK, max_tokens=60))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == known_answer(60)
        raw = api.chat.completions.with_raw_response.create(**{**ASK, "stream": False}, max_tokens=5)
    assert "," not in raw.headers["x-request-id"]
    with anthropic.Anthropic(base_url=url, api_key="x") as other:
        answer = other.messages.create(
            model=MODEL, messages=HELLO, max_tokens=60, extra_body={"temperature": 0}
        )
    [block] = answer.content
    assert block.type == "text" and block.text == known_answer(60)


@contextlib.contextmanager
def streams(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Sockets of chats that have begun to answer."""
    socks = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(open_request(url, "/v1/chat/completions", LONG))
            sock.settimeout(LONG_S)
            socks.append(sock)
            seen = b""
            while seen.count(b"data: ") < 3:
                piece = sock.recv(65536)
                assert piece, seen
                seen += piece
        yield socks


def test_a_client_that_closes_its_socket_leaves_the_engine_in_mid_stream_and_while_it_waits(url: str):
    until(idle)
    with streams(url, SEQS) as running:
        with open_request(url, "/v1/chat/completions", LONG):
            until(lambda: stats().waiting == 1)
        until(lambda: not stats().waiting)
        assert stats().running == SEQS
        running[0].close()
        until(lambda: stats().running == SEQS - 1)
    until(idle)


def test_a_full_queue_is_429_with_retry_after_in_the_form_of_each_api(url: str):
    until(idle)
    with streams(url, SEQS), contextlib.ExitStack() as stack:
        for _ in range(AT_ONCE - SEQS):
            stack.enter_context(open_request(url, "/v1/chat/completions", LONG))
        until(lambda: num_ongoing(replica()) == AT_ONCE)
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 4000}
        with httpx2.Client(base_url=url, verify=False, timeout=LONG_S) as http:
            # The queue in front of the engines takes one more; which request that is does not matter.
            for _ in range(QUEUED):
                stack.enter_context(open_request(url, "/v1/chat/completions", LONG))
            refused: list[Any] = []

            def full() -> bool:
                with contextlib.suppress(httpx2.TimeoutException):
                    refused[:] = [
                        http.post(path, json=body, timeout=2)
                        for path in ("/v1/chat/completions", "/v1/messages")
                    ]
                return len(refused) == 2

            until(full)
    assert [reply.status_code for reply in refused] == [429, 429]
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert refused[0].json()["error"]["code"] == "queue_full"
    assert refused[1].json()["error"]["type"] == "rate_limit_error"
    until(idle)


def test_an_engine_that_is_killed_is_replaced_and_the_next_request_is_answered(url: str):
    until(idle)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api:
        streamed = iter(api.chat.completions.create(**ASK, max_tokens=4000, extra_body={"ignore_eos": True}))
        next(streamed)
        ray.kill(replica())
        with pytest.raises(openai.APIError, match="engine has stopped"):
            list(streamed)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=10) as api:
        answer = api.chat.completions.create(**{**ASK, "stream": False}, max_tokens=60)
    assert answer.choices[0].message.content == known_answer(60)


def test_a_stream_that_runs_while_the_service_is_deployed_anew_finishes(url: str):
    until(idle)
    before = replica_names()
    anew = threading.Thread(target=lambda: serve.run(application(config(model_name=MODEL)), name=NAME))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=10) as api:
        streamed = iter(api.chat.completions.create(**ASK, max_tokens=400, extra_body={"ignore_eos": True}))
        pieces = [next(streamed)]
        anew.start()
        pieces += streamed
        assert pieces[-1].choices[0].finish_reason == "length"
        words = "".join(piece.choices[0].delta.content or "" for piece in pieces).split()
        assert len(words) == 400
        anew.join()
        assert not set(replica_names()).intersection(before)
        answer = api.chat.completions.create(**{**ASK, "stream": False}, max_tokens=60)
    assert answer.choices[0].message.content == known_answer(60)


def job(tmp_path: Path, output: str, **settings: Any) -> BatchConfig:
    values = {"output": str(tmp_path / output), "engine": {"model": MODEL}, "sampling": {"max_tokens": 12}}
    return BatchConfig(**{"input": str(tmp_path / "in"), "shard": {"rows": 10}, **values, **settings})


class Ongoing(threading.Thread):
    """Requests that Serve counts at the engine, again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[int] = set()
        self._replica = replica()
        self._enough = threading.Event()

    def run(self) -> None:
        while not self._enough.wait(0.05):
            self.seen.add(num_ongoing(self._replica))

    def __enter__(self) -> Ongoing:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self.join()


def test_a_job_with_the_service_s_engines_writes_the_rows_of_one_with_its_own_and_serve_counts_none(
    url: str, tmp_path: Path
):
    (tmp_path / "in").write_bytes(jsonl([{**row, "temperature": 1.0} for row in prompts(60)]))
    own = run_batch(job(tmp_path, "own", pool="own"), io.StringIO())
    log = io.StringIO()
    until(idle)
    with Ongoing() as ongoing:
        served = run_batch(job(tmp_path, "served", pool="serve"), log)
    assert f"the engines of service {NAME} do the rows" in log.getvalue()
    assert ongoing.seen == {0}
    assert output_rows(tmp_path / "served") == output_rows(tmp_path / "own")
    assert served.totals == own.totals
    auto = io.StringIO()
    run_batch(job(tmp_path, "auto"), auto)
    assert f"the engines of service {NAME} do the rows" in auto.getvalue()


def test_the_death_of_an_engine_under_a_job_loses_no_row(url: str, tmp_path: Path):
    until(idle)
    (tmp_path / "in").write_bytes(jsonl(prompts(60)))
    killed = threading.Event()

    def kill() -> None:
        until(lambda: stats().running)
        ray.kill(replica())
        killed.set()

    thread = threading.Thread(target=kill)
    thread.start()
    summary = run_batch(job(tmp_path, "out", pool="serve"), io.StringIO())
    thread.join()
    assert killed.is_set()
    rows = output_rows(tmp_path / "out")
    assert len({row["row_id"] for row in rows}) == len(rows) == summary.totals.rows_ok == 60


def test_a_job_that_the_service_would_answer_otherwise_is_refused_and_both_are_named(
    url: str, tmp_path: Path
):
    (tmp_path / "in").write_bytes(jsonl(prompts(4)))
    config = job(tmp_path, "out", pool="serve", engine={"model": "fake:0.5"})
    with pytest.raises(
        JobRefused, match=r"service test has engine.model = fake:0.01, this job asks for fake:0.5"
    ):
        run_batch(config, io.StringIO())
    auto = run_batch(job(tmp_path, "auto", engine={"model": "fake"}), io.StringIO())
    assert auto.totals.rows_ok == 4
    config = job(tmp_path, "begun", pool="serve")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "_fingerprint.json").write_text(json.dumps({"fingerprint": "f00"}))
    with pytest.raises(JobRefused, match=r"fingerprint .* was begun by one with f00"):
        run_batch(config, io.StringIO())


def test_serve_takes_the_shipped_config_and_the_application_in_it(url: str):
    schema = ServeDeploySchema.model_validate(
        yaml.safe_load((ROOT / "configs/serve/serve-config.yaml").read_text())
    )
    [app] = schema.applications
    assert app.import_path == "pipelines.service.deployment:build"
    assert schema.http_options.host == "127.0.0.1"
    built = build({**app.args, "config": str(ROOT / app.args["config"]), "replicas.max": "3"})
    assert isinstance(built, serve.Application)
    with pytest.raises(ConfigError, match="replicas"):
        build({"replicas": {"maximum": 3}})


def test_serve_that_listens_to_strangers_needs_keys_or_a_word():
    assert listening_on(ServiceConfig(), "127.0.0.1") == ServiceConfig()
    assert listening_on(ServiceConfig(allow_anonymous=True), "0.0.0.0").host == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"Serve listens on 0\.0\.0\.0"):
        listening_on(ServiceConfig(), "0.0.0.0")


def test_figures_of_the_engines_come_through_the_http_side(url: str) -> None:
    with httpx2.Client(base_url=url, verify=False) as http:
        asked = http.post("/v1/chat/completions", json={**ASK, "stream": False, "max_tokens": 5})
        used = asked.json()["usage"]["completion_tokens"]
        until(lambda: http.get("/live").json()["generated_tokens"] >= used)
        live = http.get("/live").json()
        assert live["engines"] == 1 and live["model"] == MODEL
        # This machine's price is in the table.
        assert live["cost_usd"] > 0
        text = http.get("/metrics").text
        assert 'dflash:engine_generation_tokens_total{engine="' in text
        assert http.get("/").headers["content-type"].startswith("text/html")
        assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]
