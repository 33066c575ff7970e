"""The same checkpoint under transformers' own greedy `generate`: what we compare speed and tokens with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from dflash_engine.benchmarking import Counts, Piece, Prompt, release
from dflash_engine.catalog import resolve_model
from dflash_engine.memory import MemoryReport


class TransformersBaseline:
    """One prompt at a time, with the defaults of transformers for cache and attention.

    A `dflash_engine.benchmarking.Contender` whose step is a whole answer. Raises `ConfigError` where the
    model is not to be found.
    """

    memory: MemoryReport | None = None
    counts = Counts()

    def __init__(
        self, model: str, *, dtype: str = "bfloat16", device: str = "auto", ignore_eos: bool = False
    ) -> None:
        place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        loaded: Any = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=getattr(torch, dtype))
        self._model = loaded.to(place).eval()
        self._ignore_eos = ignore_eos
        self._waiting: deque[tuple[int, Prompt, int]] = deque()
        self._num_requests = 0

    def submit(self, prompt: Prompt, max_tokens: int) -> int:
        self._num_requests += 1
        self._waiting.append((self._num_requests, prompt, max_tokens))
        return self._num_requests

    def step(self) -> list[Piece]:
        """The whole answer to the oldest request, each token with its moment."""
        key, prompt, max_tokens = self._waiting.popleft()
        ids = torch.tensor([prompt], device=self._model.device)
        clock = _Clock()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens if self._ignore_eos else None,
                do_sample=False,
                streamer=clock,
            )
        last = len(clock.tokens) - 1
        return [Piece(key, (token,), at == last, moment) for at, (token, moment) in enumerate(clock.tokens)]

    def abort(self, keys: Sequence[Hashable]) -> None:
        self._waiting.clear()

    def close(self) -> None:
        self._model = None
        release()


class _Clock(BaseStreamer):
    """Notes when `generate` hands each token out; the prompt comes first."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, float]] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.tokens += [(token, time.perf_counter()) for token in value.flatten().tolist()]
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is held back."""
