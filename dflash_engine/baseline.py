"""The same checkpoint under transformers' own greedy `generate`: what we compare speed and tokens with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dflash_engine.catalog import resolve_model
from dflash_engine.request import FinishReason, Message, Result, Usage
from dflash_engine.tokenizer import Tokenizer


class TransformersBaseline:
    """One prompt at a time, with the defaults of transformers for cache and attention.

    Raises `ConfigError` where the model is not to be found.
    """

    def __init__(self, model: str, *, dtype: str = "bfloat16", device: str = "auto") -> None:
        folder = resolve_model(model)
        place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = loaded.to(place).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [ends])
        self._tokenizer = Tokenizer.load(folder)

    def generate(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Result:
        """The answer to one conversation, from the same prompt tokens that our engine would see."""
        prompt = self._tokenizer.encode_chat([Message(turn["role"], turn["content"]) for turn in messages])
        ids = torch.tensor([prompt], device=self._model.device)
        started = time.perf_counter_ns()
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
        tokens = tuple(output[0, len(prompt) :].tolist())
        usage = Usage(
            prompt_tokens=len(prompt),
            completion_tokens=len(tokens),
            steps=max(0, len(tokens) - 1),
            busy_ns=time.perf_counter_ns() - started,
        )
        text = self._tokenizer.decode(tokens)
        reason: FinishReason = "stop" if tokens[-1] in self._ends else "length"
        return Result(request_id="", text=text, tokens=tokens, finish_reason=reason, usage=usage)
