"""An OpenAI Batch line's body as prompt and sampling values.

Fields as in OpenAI's API reference for `/v1/chat/completions` and `/v1/completions`, and the sampling fields
of this project beside them. A field that would change the answer and is not supported is an error; one
that would not is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_engine.request import SamplingParams
from pipelines.rows import BadRow, type_name

CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"
SAMPLING_FIELDS = frozenset(SamplingParams.model_fields)
GRAMMAR_FIELDS = frozenset({"json_schema", "regex"})
"""Of which a request may have one: where a row has its own, that of the job does not hold for it."""

_IGNORED = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "stream",
        "stream_options",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    }
)
_ONLY_DEFAULT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "modalities": (["text"],),
}


def check_envelope(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a Batch line. Raises `BadRow` for another method, url or type of body."""
    if line.get("method") != "POST":
        raise BadRow("invalid_row", f"method {_shown(line.get('method'))} is not POST")
    if line.get("url") not in (CHAT_URL, TEXT_URL):
        raise BadRow("unknown_url", f"url {_shown(line.get('url'))} is not {CHAT_URL} or {TEXT_URL}")
    body = line["body"]
    if not isinstance(body, dict):
        raise BadRow("invalid_row", f"body is {type_name(body)}, not an object")
    return body


def sampling_fields(body: Mapping[str, Any], prompt_field: str) -> dict[str, Any]:
    """Sampling values of a body. Raises `BadRow` for a field that is not supported."""
    fields = {name: value for name, value in body.items() if value is not None}
    values = {name: fields.pop(name) for name in SAMPLING_FIELDS & fields.keys()}
    if "max_completion_tokens" in fields:
        values["max_tokens"] = fields.pop("max_completion_tokens")
    top_logprobs = fields.pop("top_logprobs", 0)
    if isinstance(values.get("logprobs"), bool):
        asked = values.pop("logprobs")
        values |= {"logprobs": top_logprobs} if asked else {}
    if "response_format" in fields:
        values |= _grammar(fields.pop("response_format"), values)
    for name in fields.keys() - _IGNORED - {prompt_field}:
        if fields[name] not in _ONLY_DEFAULT.get(name, ()):
            raise BadRow("unsupported_parameter", f"{name} = {_shown(fields[name])} is not supported")
    return values


def completion_prompt(prompt: object) -> dict[str, Any]:
    """`text` or `token_ids` of a request from the prompt of `/v1/completions`. Raises `BadRow`."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt):
        return {"token_ids": tuple(prompt)}
    raise BadRow("invalid_prompt", "prompt is not one text or one list of token ids")


def _grammar(response_format: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """`response_format` as sampling values. Raises `BadRow`."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        shown = _shown(response_format)
        raise BadRow("unsupported_parameter", f"response_format = {shown} is not supported")
    if GRAMMAR_FIELDS & values.keys():
        raise BadRow("invalid_sampling", "response_format excludes json_schema and regex beside it")
    if kind == "text":
        return {"json_schema": None}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    assert isinstance(response_format, dict)
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise BadRow("invalid_sampling", "response_format: json_schema.schema is not an object")
    return {"json_schema": schema}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
