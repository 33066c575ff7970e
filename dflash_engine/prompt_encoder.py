"""The tokens of a prompt, with the refusals of those that cannot be answered; no model is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from dflash_engine.config import EngineConfig
from dflash_engine.errors import BadPrompt, PromptTooLong
from dflash_engine.request import Message, Request
from dflash_engine.sources import find
from dflash_engine.tokenizer import Tokenizer


class Encoding(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...


class PromptEncoder:
    """Safe to use from several threads."""

    def __init__(self, tokenizer: Encoding, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    @classmethod
    def open(cls, config: EngineConfig) -> Self:
        """That of the engine of a config. Raises `ConfigError`."""
        sources = find(config)
        return cls(Tokenizer.load(sources.folder), sources.max_model_len)

    def encode(self, request: Request) -> Sequence[int]:
        """Token ids. Raises `RequestError` where there are none, or no room for an answer behind them."""
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
