"""An answer's text as a client wants it: thoughts, words and tool calls apart, also while it streams."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from dflash_engine.stops import num_begun
from pipelines.service.dialect import Dialect, ToolFormat

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of thought or of text."""

    kind: Literal["thinking", "text"]
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is a JSON object as text, `call_id` bare: each API has its own prefix."""

    call_id: str
    name: str
    arguments: str


Part = Delta | ToolCall


class OutputParser:
    """Takes an answer's text in pieces and gives its parts; nothing of it is lost.

    What looks like a call and is none stays text. `has_tools`: the request offered some. `thinking`: the
    prompt has opened the model's thoughts already. `single_call` ends the answer behind one call.
    """

    def __init__(
        self, dialect: Dialect, *, thinking: bool = False, has_tools: bool = False, single_call: bool = False
    ) -> None:
        self._tools = dialect.tools if has_tools else None
        self._single_call = single_call
        self._state: Literal["start", "thinking", "text", "call", "done"] = "text"
        if dialect.thinks:
            self._state = "thinking" if thinking else "start"
        self._rest = ""
        self._space = ""
        """White space that is shown only if no mark comes behind it."""
        self._trim_lead = self._state == "thinking"
        """A part begins here, and white space before it belongs to the mark before it."""
        self.num_calls = 0

    @property
    def is_thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, text: str) -> list[Part]:
        self._rest += text
        parts: list[Part] = []
        while self._advance(parts, final=False):
            pass
        return _merged(parts)

    def finish(self) -> list[Part]:
        """What was held back, at the answer's end."""
        parts: list[Part] = []
        while self._advance(parts, final=True):
            pass
        if self._state == "text" and self._space:
            parts.append(Delta("text", self._space))
        return _merged(parts)

    def _advance(self, parts: list[Part], *, final: bool) -> bool:
        """One step through the rest; False where more text is needed, or there is none."""
        if not self._rest or self._state == "done":
            return False
        if self._state == "start":
            return self._start(final=final)
        if self._state == "thinking":
            return self._until(END_THINK, "thinking", "text", parts, final=final)
        if self._state == "call":
            return self._call(parts, final=final)
        if self._tools is None:
            self._show("text", self._rest, parts)
            self._rest = ""
            return False
        return self._until(CALL, "text", "call", parts, final=final)

    def _start(self, *, final: bool) -> bool:
        """Thoughts stand first or nowhere."""
        text = self._rest.lstrip()
        if text.startswith(THINK):
            self._state, self._rest, self._trim_lead = "thinking", text[len(THINK) :], True
            return True
        if THINK.startswith(text) and not final:
            return False
        self._state = "text"
        return True

    def _until(
        self,
        mark: str,
        kind: Literal["thinking", "text"],
        then: Literal["text", "call"],
        parts: list[Part],
        *,
        final: bool,
    ) -> bool:
        before, found, behind = self._rest.partition(mark)
        if found:
            self._show(kind, before, parts)
            if kind == "thinking":
                self._space, self._trim_lead = "", True
            self._state, self._rest = then, behind
            return True
        held = 0 if final else num_begun(mark, self._rest)
        shown = len(self._rest) - held
        self._show(kind, self._rest[:shown], parts)
        self._rest = self._rest[shown:]
        return False

    def _show(self, kind: Literal["thinking", "text"], text: str, parts: list[Part]) -> None:
        """Without the line feeds that templates write around thoughts and calls."""
        text = self._space + text
        self._space = ""
        if self._trim_lead:
            text = text.lstrip()
        if kind == "thinking" or self._tools is not None:
            kept = text.rstrip()
            self._space, text = text[len(kept) :], kept
        if text:
            self._trim_lead = False
            parts.append(Delta(kind, text))

    def _call(self, parts: list[Part], *, final: bool) -> bool:
        inside, found, behind = self._rest.partition(END_CALL)
        if not found and not final:
            return False
        call = parse_call(inside, self._tools or "json")
        if call is None:
            self._show("text", f"{CALL}{inside}{found}", parts)
        else:
            self._space, self._trim_lead = "", True
            self.num_calls += 1
            parts.append(call)
        self._rest = behind
        self._state = "done" if call is not None and self._single_call else "text"
        return True


def parse_call(text: str, form: ToolFormat) -> ToolCall | None:
    """The call between the marks; None where it is none."""
    found = _json_call(text) if form == "json" else _xml_call(text)
    if found is None:
        return None
    name, arguments = found
    return ToolCall(secrets.token_hex(12), name, orjson.dumps(arguments).decode())


def _json_call(text: str) -> tuple[str, dict[str, Any]] | None:
    value = _json(text)
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return (name, arguments) if isinstance(name, str) and name and isinstance(arguments, dict) else None


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Values are text, or JSON where they read as such."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    arguments = {}
    for parameter in _PARAMETER.finditer(function[2]):
        value = _json(parameter[2])
        arguments[parameter[1]] = parameter[2] if value is None and parameter[2] != "null" else value
    return function[1], arguments


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _merged(parts: list[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Delta) and isinstance(last, Delta) and part.kind == last.kind:
            merged[-1] = Delta(part.kind, last.text + part.text)
        else:
            merged.append(part)
    return merged
