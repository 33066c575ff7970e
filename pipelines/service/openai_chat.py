"""Chat completions: from a body to turns and tools, and from an answer's parts to OpenAI's objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from dflash_engine.request import FinishReason, Result, Usage
from pipelines.service.dialect import Dialect
from pipelines.service.errors import invalid, unsupported
from pipelines.service.forced_calls import forced_tools
from pipelines.service.openai_body import ChatBody, ChatMessage
from pipelines.service.output import Delta, Part, ToolCall

_UNSUPPORTED = ("audio", "functions", "function_call", "web_search_options", "moderation")


def check_supported(body: ChatBody, dialect: Dialect) -> None:
    """Raises `ApiError` 400 for what would change the answer and cannot be done."""
    for name in _UNSUPPORTED:
        if getattr(body, name) is not None:
            raise unsupported(name, "not supported by this service")
    if body.modalities not in (None, ["text"]):
        raise unsupported("modalities", "the model writes text only")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
    if body.tools and dialect.tools is None and body.tool_choice != "none":
        raise unsupported("tools", "the model has no tools in its chat template")


def turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Turns for the chat template. Raises `ApiError` 400 for content that is no text."""
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]


def tools(body: ChatBody) -> list[dict[str, Any]]:
    """Tools that the model may call; none where it is told not to."""
    if body.tool_choice == "none":
        return []
    return [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in body.tools or ()
    ]


def forced(body: ChatBody) -> list[Mapping[str, Any]]:
    """Tools of which the model must call one; empty where it is free. Raises `ApiError` 400."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        return forced_tools(tools(body), None)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid("tool_choice: is not auto, none, required or a function by its name", "tool_choice")
    return forced_tools(tools(body), name)


def template_options(body: ChatBody, dialect: Dialect, *, constrained: bool) -> dict[str, Any]:
    """Values for the template itself. A `constrained` answer has no place for thoughts."""
    options = dict(body.chat_template_kwargs or {})
    if constrained and dialect.thinking_switch:
        options["enable_thinking"] = False
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if dialect.thinking_switch:
            options.setdefault("enable_thinking", body.reasoning_effort != "none")
    return options


def completion(
    body: ChatBody, response_id: str, created_s: int, choices: Sequence[dict[str, Any]], used: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created_s,
        "model": body.model,
        "choices": list(choices),
        "usage": used,
        "system_fingerprint": None,
        "service_tier": None,
    }


def choice(
    index: int, parts: Sequence[Part], result: Result, logprobs: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """One whole answer. `seed` is the one used: with it the same answer can be had again."""
    calls = [part for part in parts if isinstance(part, ToolCall)]
    text = _text(parts, "text")
    thoughts = _text(parts, "thinking")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": None,
        "annotations": [],
    }
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return {
        "index": index,
        "message": message,
        "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
        "finish_reason": finish_reason(result.finish_reason, bool(calls)),
        "seed": result.seed,
    }


def delta(part: Part, call_index: int) -> dict[str, Any]:
    """The `delta` of a streamed piece; `call_index` counts the calls of the choice."""
    if isinstance(part, Delta):
        return {"content" if part.kind == "text" else "reasoning_content": part.text}
    return {"tool_calls": [{"index": call_index, **_call(part)}]}


def finish_reason(reason: FinishReason, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason == "stop" else reason


def usage(used: Sequence[Usage], num_choices: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Of all choices together; those of one prompt share it, so its tokens count once."""
    prompts = used[::num_choices]
    prompt_tokens = sum(each.prompt_tokens for each in prompts)
    completion_tokens = sum(each.completion_tokens for each in used)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(each.cached_tokens for each in prompts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _turn(message: ChatMessage, place: str) -> dict[str, Any]:
    # Templates know one word for what developers and operators say.
    role = "system" if message.role == "developer" else message.role
    content = _content(message, place)
    if content is None and not (role == "assistant" and message.tool_calls):
        raise invalid(f"{place}.content: field required for role {message.role}", f"{place}.content")
    turn: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    elif role == "tool":
        raise invalid(f"{place}.tool_call_id: field required", f"{place}.tool_call_id")
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{place}.tool_calls[{index}]"),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    return turn


def _content(message: ChatMessage, place: str) -> str | None:
    if not isinstance(message.content, list):
        return message.content
    texts = []
    for index, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            where = f"{place}.content[{index}]"
            raise invalid(
                f"{where}: type {part.type[:40]!r} is not supported; the model reads text only", where
            )
        texts.append(part.text)
    return "".join(texts)


def _arguments(text: str, place: str) -> dict[str, Any]:
    """Templates write arguments as objects; clients send them as text."""
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError as error:
        where = f"{place}.function.arguments"
        raise invalid(f"{where}: not valid JSON: {error}", where) from error
    return value if isinstance(value, dict) else {"value": value}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{call.call_id}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _text(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if isinstance(part, Delta) and part.kind == kind)
