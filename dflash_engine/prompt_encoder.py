"""The tokens of a prompt, asked without loading the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dflash_engine.config import EngineConfig
from dflash_engine.errors import BadPrompt, PromptTooLong
from dflash_engine.fake import FakeEngine, is_fake
from dflash_engine.request import Request


class PromptEncoder(Protocol):
    def encode(self, request: Request) -> Sequence[int]:
        """Token ids. Raises `RequestError` where the engine would refuse the prompt."""
        ...


def open_encoder(config: EngineConfig) -> PromptEncoder:
    """Raises `ConfigError` where the model's configuration or tokenizer is not there."""
    return FakeEngine(config) if is_fake(config.model) else TokenizerEncoder(config)


class TokenizerEncoder:
    """With the model's own tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, config: EngineConfig) -> None:
        # Imported here: they bring transformers, which those who only name the type do without.
        from dflash_engine.sources import find
        from dflash_engine.tokenizer import Tokenizer

        sources = find(config)
        self._max_model_len = sources.max_model_len
        self._tokenizer = Tokenizer.load(sources.folder)

    def encode(self, request: Request) -> Sequence[int]:
        if request.messages is not None:
            tokens: Sequence[int] = self._tokenizer.encode_chat(request.messages)
        elif request.text is not None:
            tokens = self._tokenizer.encode(request.text)
        else:
            tokens = request.token_ids or ()
        if not tokens:
            raise BadPrompt("the prompt is empty")
        if len(tokens) >= self._max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, but the model takes {self._max_model_len} in all"
            )
        return tokens
