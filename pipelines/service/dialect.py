"""What a model's chat template says about its answers: whether it thinks, and how it calls tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolFormat = Literal["json", "xml"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """`tools` is how calls are written between `<tool_call>` and `</tool_call>`; None without any.

    `json`: an object with name and arguments (Hermes, Qwen3). `xml`: `<function=…>` with `<parameter=…>`
    elements (Qwen3-Coder, Qwen3.5).
    """

    thinks: bool = False
    tools: ToolFormat | None = None
    thinking_switch: bool = False
    """The template takes `enable_thinking`."""
    system_anywhere: bool = True
    """The template takes system turns behind others."""


PLAIN = Dialect()


def read_dialect(template: str, *, system_anywhere: bool = True) -> Dialect:
    """The dialect of a chat template, from the marks that it writes."""
    tools: ToolFormat | None = None
    if "<tool_call>" in template and "tools" in template:
        tools = "xml" if "<function=" in template else "json"
    return Dialect(
        thinks="<think>" in template or "</think>" in template,
        tools=tools,
        thinking_switch="enable_thinking" in template,
        system_anywhere=system_anywhere,
    )
