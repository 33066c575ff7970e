"""From an Anthropic body to turns and tools for the chat template. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.service.anthropic_body import Block, ChatTurn, MessagesBody, PromptBody
from pipelines.service.dialect import Dialect
from pipelines.service.errors import invalid, unsupported
from pipelines.service.forced_calls import call_schema, forced_tools

_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|$)", re.IGNORECASE)
"""Claude Code's first line: it differs in every request, so that nothing behind it would be in the cache."""


def check_supported(body: PromptBody, dialect: Dialect) -> None:
    """Raises `ApiError` 400 for what would change the answer and cannot be done."""
    for index, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise unsupported(
                f"tools.{index}.type", f"{tool.type[:60]!r} would run here; only custom tools do not"
            )
        if tool.input_schema is None:
            raise invalid(f"tools.{index}.input_schema: field required", "tools")
    choice = body.tool_choice.type if body.tool_choice else "auto"
    if body.tools and dialect.tools is None and choice != "none":
        raise unsupported("tools", "the model has no tools in its chat template")
    if body.mcp_servers:
        raise unsupported("mcp_servers", "this service calls no other servers")
    if isinstance(body, MessagesBody) and body.container is not None:
        raise unsupported("container", "this service runs no code")
    if body.messages[-1].role == "assistant":
        raise unsupported("messages", "the conversation must end with a user turn; answers cannot be begun")


def turns(body: PromptBody, dialect: Dialect) -> list[dict[str, Any]]:
    """System, then the turns in their order. Raises `ApiError` 400 for content that is no text.

    System turns between the others stay where they are, so that what stands before them is found in the
    prefix cache. One that follows the user's words or a tool's result is said in the user's turn: a model
    answers the user, and loses its thread when the last turn is a system's. That holds whether or not it is
    the last turn, so the same conversation has the same beginning one turn later.
    """
    made: list[dict[str, Any]] = []
    system = _system_text(body.system)
    if system:
        made.append({"role": "system", "content": system})
    for index, turn in enumerate(body.messages):
        place = f"messages.{index}"
        if turn.role == "system":
            _add_system(made, turn, place, dialect)
        elif turn.role == "user":
            _add_user(made, _blocks(turn.content), place)
        else:
            made.append(_assistant(_blocks(turn.content), place))
    return made


def tools(body: PromptBody) -> list[dict[str, Any]]:
    """Tools that the model may call; none where it is told not to."""
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema or {},
            },
        }
        for tool in body.tools or ()
    ]


def forced(body: PromptBody) -> list[Mapping[str, Any]]:
    """Tools of which the model must call one; empty where it is free. Raises `ApiError` 400."""
    choice = body.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return []
    if choice.type == "tool" and choice.name is None:
        raise invalid("tool_choice.name: field required", "tool_choice")
    return forced_tools(tools(body), choice.name if choice.type == "tool" else None)


def schema(body: PromptBody) -> dict[str, Any] | None:
    """The JSON Schema that the whole answer is held to, if any."""
    if calls := forced(body):
        return call_schema(calls)
    wanted = body.output_config.format if body.output_config else None
    return wanted.json_schema if wanted else None


def template_options(body: PromptBody, dialect: Dialect) -> dict[str, Any]:
    """Values for the template: a model thinks only where it is asked to, as the service's own do, and
    where its answer is free to."""
    options: dict[str, Any] = {}
    if dialect.thinking_switch:
        wanted = body.thinking is not None and body.thinking.type != "disabled"
        options["enable_thinking"] = wanted and schema(body) is None
    if body.output_config is not None and body.output_config.effort is not None:
        options["reasoning_effort"] = body.output_config.effort
    return options


def _system_text(system: str | list[Block] | None) -> str:
    texts = [_text(block, f"system.{index}") for index, block in enumerate(_blocks(system or ""))]
    kept = [_BILLING.sub("", text, count=1) for text in texts]
    return "\n\n".join(text for text in kept if text)


def _add_system(made: list[dict[str, Any]], turn: ChatTurn, place: str, dialect: Dialect) -> None:
    texts = [_text(block, f"{place}.content.{index}") for index, block in enumerate(_blocks(turn.content))]
    text = "\n\n".join(kept for each in texts if (kept := _BILLING.sub("", each, count=1)))
    if not text:
        return
    if made and made[-1]["role"] in ("user", "tool"):
        _say(made, text)
    elif made and made[-1]["role"] == "system":
        made[-1]["content"] += f"\n\n{text}"
    elif made and not dialect.system_anywhere:
        made.append({"role": "user", "content": text})
    else:
        made.append({"role": "system", "content": text})


def _add_user(made: list[dict[str, Any]], blocks: Sequence[Block], place: str) -> None:
    for index, block in enumerate(blocks):
        where = f"{place}.content.{index}"
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise invalid(f"{where}.tool_use_id: field required", where)
            made.append(
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": _tool_result(block, where)}
            )
        elif text := _text(block, where):
            _say(made, text)


def _say(made: list[dict[str, Any]], text: str) -> None:
    """In the user's turn, a new one where the last is another's: templates want the roles to alternate."""
    if made and made[-1]["role"] == "user":
        made[-1]["content"] += f"\n\n{text}"
    else:
        made.append({"role": "user", "content": text})


def _tool_result(block: Block, place: str) -> str:
    parts = _blocks(block.content or "")
    text = "\n\n".join(_text(part, f"{place}.content.{index}") for index, part in enumerate(parts))
    return f"Error: {text}" if block.is_error else text


def _assistant(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        where = f"{place}.content.{index}"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.id is None or block.name is None:
                raise invalid(f"{where}: tool_use needs id and name", where)
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type != "redacted_thinking":  # which no other model can read
            texts.append(_text(block, where))
    turn: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(text for text in texts if text)}
    if calls:
        turn["tool_calls"] = calls
    if any(thoughts):
        turn["reasoning_content"] = "\n\n".join(thoughts)
    return turn


def _blocks(content: str | list[Block]) -> list[Block]:
    return [Block(type="text", text=content)] if isinstance(content, str) else content


def _text(block: Block, place: str) -> str:
    if block.type != "text":
        raise invalid(f"{place}: type {block.type[:40]!r} is not supported here; the model reads text", place)
    if block.text is None:
        raise invalid(f"{place}.text: field required", place)
    return block.text
