"""An engine that says what a test tells it to, in pieces, and can be stopped at any of them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from dflash_engine.errors import BadPrompt
from dflash_engine.health import EngineHealth
from dflash_engine.request import Chunk, Request, Result, TokenLogprob, Usage
from dflash_engine.stats import EngineStats
from dflash_engine.stops import StopWatcher
from pipelines.service.app import create_app
from pipelines.service.config import ServiceConfig
from pipelines.service.dialect import PLAIN, Dialect
from pipelines.service.engine_client import ChatPrompt, ServedModel
from pipelines.service.local import serving

MODEL = "echo-1"
MAX_MODEL_LEN = 2000
TOOLS = Dialect(tools="json")
THINKS = Dialect(thinks=True, tools="json", thinking_switch=True)


class Letters:
    """A tokenizer whose tokens are code points, and a stream of them."""

    def __init__(self, dialect: Dialect = PLAIN) -> None:
        self.dialect = dialect
        self.seen: list[tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], Mapping[str, Any]]] = []

    def encode_chat(self, turns, tools=(), options=None) -> ChatPrompt:
        self.seen.append((list(turns), list(tools), dict(options or {})))
        if any(turn["content"] == "refuse me" for turn in turns):
            raise BadPrompt("the model's chat template refuses the messages: not nice")
        text = "".join(f"<{turn['role']}>{turn['content']}{turn.get('tool_calls', '')}" for turn in turns)
        return ChatPrompt(self.encode(f"{tools}{text}<assistant>"))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def push(self, token: int) -> str:
        return chr(token)

    def push_all(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens)

    def flush(self) -> str:
        return ""


Script = Callable[[Request], str]


@dataclass
class ScriptedEngine:
    """Answers by script. `step` tokens make a piece; it waits for `go` before piece `hold_at`."""

    script: Script = lambda request: "Hello, world!"
    step: int = 3
    hold_at: int | None = None
    error: Exception | None = None
    """Raised before piece `error_at`."""
    error_at: int = 0
    cached_tokens: int = 0
    fingerprint: str = "scripted"
    requests: list[Request] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)
    aborted: dict[str, threading.Event] = field(default_factory=dict)
    any_abort: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    """Some call of `submit` was left before its result."""
    running: int = 0
    healthy: EngineHealth = field(default_factory=lambda: EngineHealth(alive=True))

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        self.running += 1
        finished = False
        try:
            for number, chunk in enumerate(self._chunks(request)):
                if self.error is not None and number >= self.error_at:
                    raise self.error
                if number == self.hold_at:
                    self.holding.set()
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                finished = chunk.result is not None
                yield chunk
        finally:
            self.running -= 1
            if not finished:
                self.ended.set()

    def abort(self, request_id: str) -> None:
        self.aborted.setdefault(request_id, threading.Event()).set()
        self.any_abort.set()

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running)

    def health(self) -> EngineHealth:
        return self.healthy

    def _chunks(self, request: Request):
        sampling = request.sampling
        tokens = tuple(map(ord, self.script(request)))
        watcher = StopWatcher(Letters(), sampling, (), sampling.max_tokens or 10**6)
        done: list[int] = []
        texts: list[str] = []
        for start in range(0, len(tokens), self.step):
            given = tokens[start : start + self.step]
            kept, text, finish = watcher.accept(given)
            done += given[:kept]
            texts.append(text)
            logprobs = self._logprobs(request, given[:kept])
            result = None
            if finish is not None:
                result = self._result(request, done, texts, finish, watcher.matched)
            yield Chunk(text, given[:kept], result, self.cached_tokens, logprobs)
            if finish is not None:
                return
        texts.append(watcher.flush())
        result = self._result(request, done, texts, "stop", watcher.matched)
        yield Chunk(texts[-1], (), result, self.cached_tokens)

    def _logprobs(self, request: Request, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        wanted = request.sampling.logprobs
        return tuple(
            TokenLogprob(token, -0.25, tuple((token + more, -0.25 - more) for more in range(wanted)))
            for token in (tokens if wanted is not None else ())
        )

    def _result(
        self, request: Request, tokens: list[int], texts: list[str], finish: Any, matched: str | int | None
    ) -> Result:
        return Result(
            request_id=request.request_id,
            text="".join(texts),
            tokens=tuple(tokens),
            finish_reason=finish,
            matched_stop=matched,
            usage=Usage(len(request.token_ids), self.cached_tokens, len(tokens)),
            seed=request.sampling.seed,
            logprobs=self._logprobs(request, tokens) if request.sampling.logprobs is not None else None,
            fingerprint=self.fingerprint,
        )


@dataclass
class World:
    url: str
    engine: ScriptedEngine
    letters: Letters
    app: Any
    http: httpx2.Client
    """One for all requests: each client reads the machine's certificates."""


@contextmanager
def world(
    script: str | Script = "Hello, world!", *, dialect: Dialect = PLAIN, settings=None, app=None, **engine
):
    """A service on a loopback socket over a scripted engine."""
    scripted = ScriptedEngine((lambda request: script) if isinstance(script, str) else script, **engine)
    letters = Letters(dialect)
    model = ServedModel(MODEL, MAX_MODEL_LEN, letters, 1_700_000_000, ("claude-local",))
    made = create_app(scripted, model, ServiceConfig(**(settings or {})), **(app or {}))
    with serving(made) as url, httpx2.Client(base_url=url, verify=False) as http:
        yield World(url, scripted, letters, made, http)


def open_request(url, path, body):
    """An open socket on which the request has been sent."""
    address = urlsplit(url)
    raw = json.dumps(body).encode()
    sock = socket.create_connection((address.hostname, address.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


__all__ = ["MAX_MODEL_LEN", "MODEL", "THINKS", "TOOLS", "ScriptedEngine", "World", "open_request", "world"]
