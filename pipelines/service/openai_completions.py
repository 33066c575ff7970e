"""Text completions: from a body to prompts, and from answers to OpenAI's objects. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_engine.request import FinishReason
from pipelines.service.errors import invalid, unsupported
from pipelines.service.openai_body import TextBody

DEFAULT_MAX_TOKENS = 16
"""Of this endpoint, by OpenAI's reference."""


def check_supported(body: TextBody) -> None:
    """Raises `ApiError` 400 for what would change the answer and cannot be done."""
    if body.echo:
        raise unsupported("echo", "the prompt cannot be given back")
    if body.suffix:
        raise unsupported("suffix", "the model writes forwards only")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "must be the same as n")


def prompts(body: TextBody, encode: Callable[[str], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """One or several prompts as token ids. Raises `ApiError` 400."""
    given = body.prompt
    if isinstance(given, str):
        found = [encode(given)]
    elif given and isinstance(given[0], int):
        found = [tuple(token for token in given if isinstance(token, int))]
    else:
        found = [encode(each) if isinstance(each, str) else _ids(each) for each in given]
    if not found or not all(found):
        raise invalid("prompt: is empty", "prompt")
    if any(not 0 <= token < 2**31 for prompt in found for token in prompt):
        raise invalid("prompt: a token id does not exist", "prompt")
    return tuple(found)


def _ids(value: int | str | list[int]) -> tuple[int, ...]:
    assert isinstance(value, list), value
    return tuple(value)


def choice(
    index: int, text: str, reason: FinishReason | None, logprobs: dict[str, Any] | None, seed: int | None
) -> dict[str, Any]:
    """A whole answer, or a streamed piece of one with `reason` None."""
    made = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return made if reason is None else {**made, "seed": seed}


def completion(
    body: TextBody,
    response_id: str,
    created_s: int,
    choices: Sequence[dict[str, Any]],
    used: dict[str, Any] | None,
) -> dict[str, Any]:
    """The whole object; a streamed piece has the same form."""
    return {
        "id": response_id,
        "object": "text_completion",
        "created": created_s,
        "model": body.model,
        "choices": list(choices),
        "usage": used,
        "system_fingerprint": None,
    }
