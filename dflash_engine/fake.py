"""An engine without a model, for tests of everything around it: same interface, answers known beforehand.

`EngineConfig(model="fake")` answers at once; `fake:0.01` takes 0.01 s for each token. An answer is a pure
function of prompt, max_tokens and (with a temperature) seed. A prompt token is a white-space word.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import fields

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError, EngineDead, PromptTooLong
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
        self._used = Usage()
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
        async for chunk in self.submit(request):
            if chunk.result is not None:
                return chunk.result
        raise EngineDead("the answer ended without a result")

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
            drafted_tokens=self._used.drafted_tokens,
            accepted_tokens=self._used.accepted_tokens,
        )

    async def close(self) -> None:
        self._closed = True

    def _new_id(self) -> str:
        self._next_id += 1
        return f"fake-{self._next_id}"

    async def _answer(self, request: Request, request_id: str) -> AsyncIterator[Chunk]:
        prompt, prompt_tokens = _prompt(request)
        room = self._max_model_len - prompt_tokens
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens, which leaves no room in {self._max_model_len}"
            )
        sampling = request.sampling
        seed = sampling.seed or 0
        source = _digest(prompt, "" if sampling.greedy else str(seed))
        most = min(room, sampling.max_tokens or self._default_max_tokens)
        length = most if sampling.ignore_eos else 1 + int.from_bytes(source[:4]) % most
        tokens: list[int] = []
        texts: list[str] = []
        while len(tokens) < length and self._unfinished[request_id]:
            await asyncio.sleep(self._token_s)
            number = int.from_bytes(_digest(source.hex(), str(len(tokens)))[:4])
            tokens.append(number % VOCABULARY_SIZE)
            texts.append(WORDS[number % len(WORDS)])
            yield Chunk(texts[-1] if len(texts) == 1 else f" {texts[-1]}", (tokens[-1],))
        reason: FinishReason = "stop" if length < most else "length"
        usage = self._usage(prompt_tokens, len(tokens))
        self._used = _sum(self._used, usage)
        result = Result(
            request_id=request_id,
            text=" ".join(texts),
            tokens=tuple(tokens),
            finish_reason=reason if self._unfinished[request_id] else "abort",
            usage=usage,
            seed=seed,
            fingerprint=self.fingerprint,
        )
        yield Chunk("", (), result)

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
        turns = [f"{message.role}: {message.content}" for message in request.messages]
        return "\n".join(turns), sum(len(turn.split()) for turn in turns)
    text = request.text or ""
    return text, len(text.split())


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(*(getattr(one, item.name) + getattr(other, item.name) for item in fields(Usage)))


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()
