"""An engine without a model, for tests of everything around it: same interface, answers known beforehand.

`EngineConfig(model="fake")` answers at once; `fake:0.01` takes 0.01 s for each token. An answer is a pure
function of prompt, max_tokens and (with a temperature) seed. A prompt token is a white-space word.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError, EngineDead, PromptTooLong
from dflash_engine.health import EngineHealth
from dflash_engine.request import Chunk, FinishReason, Request, Result, Usage
from dflash_engine.stats import EngineStats

MODEL = "fake"
MAX_MODEL_LEN = 4096
VOCABULARY_SIZE = 50_000
STEP_NS = 1_000_000
"""Busy time attributed for each step, prefill included, whatever the clock says."""
WORDS = ("the", "your", "order", "account", "we", "can", "help", "with", "please", "thank", "today", "ready")


class FakeEngine:
    """Stands in for `AsyncEngine`. Raises `ConfigError` for a model name that is not `fake[:seconds]`."""

    def __init__(self, config: EngineConfig) -> None:
        self._token_s = _seconds_per_token(config.model)
        self._max_model_len = config.max_model_len or MAX_MODEL_LEN
        self._default_max_tokens = config.default_max_tokens
        self._num_draft = 0 if config.draft is None else (config.block_length or 8) - 1
        self._slots = asyncio.Semaphore(config.limit("max_num_seqs", "cpu"))
        self._unfinished: dict[str, bool] = {}
        self._running = 0
        self._used = _Used()
        self._closed = False
        self._next_id = 0
        self.fingerprint = _digest(MODEL, config.dtype).hex()[:16]

    async def submit(self, request: Request) -> AsyncIterator[Chunk]:
        """Chunks of one token each. Raises `PromptTooLong`, and `EngineDead` after `close`."""
        if self._closed:
            raise EngineDead("the engine is closed")
        request_id = request.request_id or self._new_id()
        self._unfinished[request_id] = True
        try:
            async with self._slots:
                self._running += 1
                try:
                    async for chunk in self._answer(request, request_id):
                        yield chunk
                finally:
                    self._running -= 1
        finally:
            del self._unfinished[request_id]

    async def generate(self, request: Request) -> Result:
        """The whole answer. Raises as `submit` does."""
        if not self._token_s:
            # What `submit` would answer, without its steps: they would cost more than all that is tested.
            if self._closed:
                raise EngineDead("the engine is closed")
            answer = self._begin(request)
            # Others take their turn, as they do between steps.
            await asyncio.sleep(0)
            return self._result(answer, request.request_id or self._new_id(), answer.tokens, aborted=False)
        async for chunk in self.submit(request):
            if chunk.result is not None:
                return chunk.result
        raise EngineDead("the answer ended without a result")

    def encode(self, request: Request) -> tuple[int, ...]:
        """The prompt's tokens, one for each word. Raises `PromptTooLong`."""
        prompt, num_tokens = _prompt(request)
        self._room(num_tokens)
        if request.token_ids is not None:
            return tuple(request.token_ids)
        return tuple(int.from_bytes(_digest(word)[:4]) % VOCABULARY_SIZE for word in prompt.split())

    def _room(self, num_prompt_tokens: int) -> int:
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens, which leaves no room in {self._max_model_len}"
            )
        return room

    def abort(self, request_id: str) -> None:
        """End a request with what it has; nothing happens where there is no such request."""
        if request_id in self._unfinished:
            self._unfinished[request_id] = False

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._unfinished) - self._running,
            running=self._running,
            steps=self._used.steps,
            busy_ns=self._used.busy_ns,
            prompt_tokens=self._used.prompt_tokens,
            completion_tokens=self._used.completion_tokens,
            drafts=self._used.steps if self._num_draft else 0,
            drafted_tokens=self._used.drafted_tokens,
            accepted_tokens=self._used.accepted_tokens,
        )

    def health(self) -> EngineHealth:
        return EngineHealth(alive=not self._closed)

    async def close(self) -> None:
        self._closed = True

    def _new_id(self) -> str:
        self._next_id += 1
        return f"fake-{self._next_id}"

    async def _answer(self, request: Request, request_id: str) -> AsyncIterator[Chunk]:
        answer = self._begin(request)
        tokens: list[int] = []
        while len(tokens) < len(answer.tokens) and self._unfinished[request_id]:
            await asyncio.sleep(self._token_s)
            tokens.append(answer.tokens[len(tokens)])
            word = _word(tokens[-1])
            yield Chunk(word if len(tokens) == 1 else f" {word}", (tokens[-1],))
        yield Chunk(
            "", (), self._result(answer, request_id, tokens, aborted=not self._unfinished[request_id])
        )

    def _begin(self, request: Request) -> _Answer:
        prompt, prompt_tokens = _prompt(request)
        room = self._room(prompt_tokens)
        sampling = request.sampling
        source = _digest(prompt, "" if sampling.greedy else str(sampling.seed or 0))
        most = min(room, sampling.max_tokens or self._default_max_tokens)
        length = most if sampling.ignore_eos else 1 + int.from_bytes(source[:4]) % most
        reason: FinishReason = "stop" if length < most else "length"
        return _Answer(_tokens(source, length), reason, prompt_tokens, sampling.seed or 0)

    def _result(self, answer: _Answer, request_id: str, tokens: list[int], *, aborted: bool) -> Result:
        usage = self._usage(answer.prompt_tokens, len(tokens))
        self._used.add(usage)
        return Result(
            request_id=request_id,
            text=" ".join([_word(token) for token in tokens]),
            tokens=tuple(tokens),
            finish_reason="abort" if aborted else answer.finish_reason,
            usage=usage,
            seed=answer.seed,
            fingerprint=self.fingerprint,
        )

    def _usage(self, prompt_tokens: int, completion_tokens: int) -> Usage:
        """Every verify step accepts two drafted tokens where there is a draft, and adds one of its own."""
        per_step = 1 + min(2, self._num_draft)
        steps = -(-max(0, completion_tokens - 1) // per_step)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            steps=steps,
            drafted_tokens=steps * self._num_draft,
            accepted_tokens=max(0, completion_tokens - 1) - steps,
            busy_ns=(1 + steps) * STEP_NS,
        )


@dataclass(slots=True)
class _Used:
    """What all answers used."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    busy_ns: int = 0

    def add(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.steps += usage.steps
        self.drafted_tokens += usage.drafted_tokens
        self.accepted_tokens += usage.accepted_tokens
        self.busy_ns += usage.busy_ns


class _Answer(NamedTuple):
    """An answer that is known beforehand."""

    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int


def is_fake(model: str) -> bool:
    """True for the model names that mean this engine."""
    return model == MODEL or model.startswith(f"{MODEL}:")


def _seconds_per_token(model: str) -> float:
    name, _, seconds = model.partition(":")
    try:
        token_s = float(seconds or 0)
    except ValueError:
        token_s = -1.0
    if name != MODEL or not 0 <= token_s < 3600:
        raise ConfigError(f"model {model}: the fake engine is called fake or fake:<seconds per token>")
    return token_s


def _prompt(request: Request) -> tuple[str, int]:
    """The whole prompt as text, and its length in tokens."""
    if request.token_ids is not None:
        return repr(request.token_ids), len(request.token_ids)
    if request.messages is not None:
        text = "\n".join([f"{message.role}: {message.content}" for message in request.messages])
    else:
        text = request.text or ""
    return text, len(text.split())


def _tokens(source: bytes, count: int) -> list[int]:
    stream = hashlib.shake_128(source).digest(4 * count)
    return [number % VOCABULARY_SIZE for number in struct.unpack(f">{count}I", stream)]


def _word(token: int) -> str:
    return WORDS[token % len(WORDS)]


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()
