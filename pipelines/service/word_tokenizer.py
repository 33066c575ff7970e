"""The fake engine's tokenizer: a token is a word, and an answer's tokens have the texts that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from dflash_engine.fake import VOCABULARY_SIZE, WORDS
from pipelines.service.dialect import PLAIN, Dialect
from pipelines.service.engine_client import ChatPrompt, Tool, Turn


class WordTokenizer:
    """Implements `ChatTokenizer`."""

    @property
    def dialect(self) -> Dialect:
        return PLAIN

    def encode_chat(
        self, turns: Sequence[Turn], tools: Sequence[Tool] = (), options: Mapping[str, Any] | None = None
    ) -> ChatPrompt:
        return ChatPrompt(self.encode("\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(_id(word) for word in text.split())

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(WORDS[token % len(WORDS)] for token in tokens)

    def token_bytes(self, token: int) -> bytes:
        return WORDS[token % len(WORDS)].encode()


def _id(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=4).digest()) % VOCABULARY_SIZE
