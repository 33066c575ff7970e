"""Sampling values of an OpenAI body. Pure."""

from __future__ import annotations

from typing import Any

from dflash_engine.request import SamplingParams
from pipelines.service.body import compact
from pipelines.service.errors import invalid
from pipelines.service.openai_body import GenerationBody, ResponseFormat

_SAME_NAME = (
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
)


def sampling_params(
    body: GenerationBody, *, temperature: float, max_tokens: int, **others: Any
) -> SamplingParams:
    """`temperature` and `max_tokens` hold where the body names none. Raises `BadSampling`."""
    values = compact({name: getattr(body, name) for name in _SAME_NAME})
    values["temperature"] = temperature if body.temperature is None else body.temperature
    values["max_tokens"] = max_tokens
    if body.seed is not None:
        values["seed"] = body.seed % 2**63  # clients may send negative ones
    if values.get("top_p") == 0:
        values |= {"top_p": 1.0, "top_k": 1}  # nothing but the best token
    return SamplingParams(**values, **compact(others))


def checked_n(body: GenerationBody, num_prompts: int, most: int) -> int:
    """Choices of each prompt. Raises `ApiError` 400 where they are too many together."""
    num_choices = body.n or 1
    if num_choices * num_prompts > most:
        raise invalid(f"n: {num_choices * num_prompts} answers were asked for; {most} are the most", "n")
    return num_choices


def json_constraint(wanted: ResponseFormat | None) -> dict[str, Any]:
    """Fields of `SamplingParams` for a response format. Raises `ApiError` 400."""
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    schema = (wanted.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise invalid("response_format.json_schema.schema: not an object", "response_format")
    return {"json_schema": schema}
