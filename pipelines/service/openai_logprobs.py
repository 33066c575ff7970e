"""Log probabilities in OpenAI's two forms. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_engine.request import TokenLogprob

MIN_LOGPROB = -9999.0
"""OpenAI's word for very unlikely; JSON knows no infinity."""

TokenBytes = Callable[[int], bytes]


def chat_logprobs(items: Sequence[TokenLogprob], token_bytes: TokenBytes) -> list[dict[str, Any]]:
    return [
        {
            **_token(item.token, item.logprob, token_bytes),
            "top_logprobs": [_token(token, logprob, token_bytes) for token, logprob in item.top],
        }
        for item in items
    ]


class Pending:
    """Log probabilities of a streamed choice whose text is held back: they go out with what is sent next."""

    def __init__(self) -> None:
        self._items: list[TokenLogprob] = []
        self._start = 0

    def add(self, items: Sequence[TokenLogprob]) -> None:
        self._items += items

    def for_chat(self, token_bytes: TokenBytes) -> list[dict[str, Any]] | None:
        """What has not been sent; None where that is nothing."""
        return chat_logprobs(self._take(), token_bytes) if self._items else None

    def for_text(self, token_bytes: TokenBytes) -> dict[str, list[Any]] | None:
        """As `for_chat`; offsets go on from one to the next."""
        if not self._items:
            return None
        made = text_logprobs(self._take(), token_bytes, self._start)
        self._start += sum(map(len, made["tokens"]))
        return made

    def _take(self) -> list[TokenLogprob]:
        items, self._items = self._items, []
        return items


def text_logprobs(
    items: Sequence[TokenLogprob], token_bytes: TokenBytes, start: int = 0
) -> dict[str, list[Any]]:
    """`text_offset` counts characters from `start`, where the answer's text begins."""
    tokens = [_name(token_bytes(item.token)) for item in items]
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(item.logprob) for item in items],
        "top_logprobs": [
            {_name(token_bytes(token)): _finite(logprob) for token, logprob in item.top} for item in items
        ],
        "text_offset": offsets,
    }


def _token(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes(token)
    return {"token": _name(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _name(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
