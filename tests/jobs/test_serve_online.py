"""The service as people start and end it: a process with a cluster of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = "fake:0.02"
LONG_S = 120.0
TOKENS = 200


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The job, ended in every case."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "jobs/serve_online.py", "--config", "configs/serve/fake.yaml", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str], word: str) -> None:
    """Returns when a line of its stderr has the word in it."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if word in line:
            return
    raise AssertionError(seen)


@pytest.mark.ray
def test_sigterm_lets_the_stream_that_runs_finish_and_refuses_new_ones(tmp_path: Path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with started("--port", str(port), "--set", f"ledger={tmp_path / 'ledger'}") as process:
        told(process, f"serving {MODEL} at {url}")
        told(process, "SIGTERM ends it")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api:
            ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": TOKENS}
            stream = iter(api.chat.completions.create(**ask, stream=True, extra_body={"ignore_eos": True}))
            pieces = [next(stream)]
            process.send_signal(signal.SIGTERM)
            told(process, "no new requests")
            with httpx2.Client(base_url=url, verify=False, timeout=LONG_S) as http:
                while (refused := http.post("/v1/chat/completions", json=ask)).status_code == 200:
                    pass
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "shutting_down"
            pieces += stream
        words = "".join(piece.choices[0].delta.content or "" for piece in pieces).split()
        assert len(words) == TOKENS
        assert pieces[-1].choices[0].finish_reason == "length"
        output, log = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, log
    assert json.loads(output.splitlines()[-1])["model"] == MODEL
    files = (tmp_path / "ledger").rglob("*.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [line["completion_tokens"] for line in lines if line["completion_tokens"] == TOKENS] == [TOKENS]
    assert {line["owner"] for line in lines} == {"anonymous"}


def refusal(*arguments: str) -> str:
    with started(*arguments) as process:
        output, log = process.communicate(timeout=LONG_S)
    assert process.returncode == 2, log
    assert output == ""
    return log.strip()


def test_an_address_that_others_reach_needs_keys_or_a_word():
    log = refusal("--set", "service.host=0.0.0.0")
    assert log.startswith("serve_online: configs/serve/fake.yaml: service: ")
    assert "name a file of keys, or set allow_anonymous" in log


def test_a_port_that_is_taken_is_told_in_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        log = refusal("--port", str(port))
    assert log.startswith(f"serve_online: 127.0.0.1:{port} cannot be listened on: Address already in use")
