"""From the parts of an answer to Anthropic's message, whole or as events. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Literal

import orjson

from dflash_engine.request import Result, Usage
from pipelines.service.output import Delta, Part, ToolCall

Event = dict[str, Any]


def message(
    message_id: str, model: str, parts: Sequence[Part], stop: tuple[str, str | None], used: Usage
) -> dict[str, Any]:
    """A whole message. `stop` is reason and stop sequence."""
    return {
        **_empty_message(message_id, model),
        "content": content(parts),
        "stop_reason": stop[0],
        "stop_sequence": stop[1],
        "usage": usage(used),
    }


def content(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Content blocks; pieces of one kind in a row are one block."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        last = blocks[-1] if blocks else None
        if isinstance(part, ToolCall):
            blocks.append({**_tool_use(part), "input": orjson.loads(part.arguments)})
        elif last is not None and last["type"] == part.kind:
            last[part.kind] += part.text
        else:
            blocks.append({"type": part.kind, part.kind: part.text})
    for block in blocks:
        if block["type"] == "thinking":
            block["signature"] = signature(block["thinking"])
    return blocks


def usage(used: Usage) -> dict[str, Any]:
    """Input is what was not in the cache; the three kinds of input add up to the prompt."""
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.completion_tokens,
    }


def stop_reason(result: Result, *, has_calls: bool, max_tokens: int) -> tuple[str, str | None]:
    """Reason and stop sequence. `max_tokens` is what the client asked for."""
    if result.finish_reason == "length":
        cut_short = result.usage.completion_tokens < max_tokens
        return ("model_context_window_exceeded" if cut_short else "max_tokens"), None
    if isinstance(result.matched_stop, str):
        return "stop_sequence", result.matched_stop
    return ("tool_use" if has_calls else "end_turn"), None


def signature(thoughts: str) -> str:
    """A digest: clients send it back with the thoughts and want one, here nothing is checked by it."""
    return blake2b(thoughts.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


class EventWriter:
    """The events of one streamed message, in their order."""

    def __init__(self, message_id: str, model: str, prompt: Usage) -> None:
        """`prompt` is what is used before the answer begins."""
        self._message = _empty_message(message_id, model)
        self._message["usage"] = usage(prompt)
        self._index = -1
        self._open: Literal["thinking", "text"] | None = None
        self._thoughts = ""

    def start(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message}
        yield {"type": "ping"}

    def part(self, part: Part) -> Iterator[Event]:
        if isinstance(part, ToolCall):
            yield from self._close()
            yield self._begin({**_tool_use(part), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
            yield {"type": "content_block_stop", "index": self._index}
        else:
            yield from self._write(part)

    def end(self, stop: tuple[str, str | None], used: Usage) -> Iterator[Event]:
        yield from self._close()
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": stop[0], "stop_sequence": stop[1]},
            "usage": usage(used),
        }
        yield {"type": "message_stop"}

    def _write(self, part: Delta) -> Iterator[Event]:
        if self._open != part.kind:
            yield from self._close()
            empty = {"type": part.kind, part.kind: ""}
            yield self._begin(empty if part.kind == "text" else {**empty, "signature": ""})
            self._open = part.kind
        if part.kind == "thinking":
            self._thoughts += part.text
        yield self._delta({"type": f"{part.kind}_delta", part.kind: part.text})

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature(self._thoughts)})
            self._thoughts = ""
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _begin(self, block: dict[str, Any]) -> Event:
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _empty_message(message_id: str, model: str) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call.call_id}", "name": call.name}
