"""Calls that the model is made to write: the whole answer is one, held to the tools' own schemas. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.service.errors import invalid
from pipelines.service.output import Delta, Part, parse_call


def forced_tools(tools: Sequence[Mapping[str, Any]], name: str | None) -> list[Mapping[str, Any]]:
    """The tools that may be called: the named one, or all. Raises `ApiError` 400 where there is none."""
    found = [tool for tool in tools if name is None or tool["function"]["name"] == name]
    if not found:
        what = "a call needs tools" if name is None else f"there is no tool {name[:100]!r}"
        raise invalid(f"tool_choice: {what}", "tool_choice")
    return found


def call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """JSON Schema of a call of one of these."""
    return {"anyOf": [_one(tool["function"], f"#/anyOf/{index}") for index, tool in enumerate(tools)]}


class CallParser:
    """Has the face of `OutputParser`; an answer that was cut off before its end is text."""

    def __init__(self) -> None:
        self._text = ""
        self.num_calls = 0
        self.is_thinking = False

    def push(self, text: str) -> list[Part]:
        self._text += text
        return []

    def finish(self) -> list[Part]:
        call = parse_call(self._text, "json")
        if call is not None:
            self.num_calls = 1
            return [call]
        return [Delta("text", self._text)] if self._text else []


def _one(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = _moved(function.get("parameters") or {"type": "object"}, f"{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """The schema with references into itself that hold at another place of a larger one."""
    if isinstance(schema, Mapping):
        return {
            key: f"{place}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema
