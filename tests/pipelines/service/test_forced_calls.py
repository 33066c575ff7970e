"""Calls that a model is made to write."""

from __future__ import annotations

from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from pipelines.service.errors import ApiError
from pipelines.service.forced_calls import CallParser, call_schema, forced_tools
from pipelines.service.output import Delta


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NODE = tool(
    "grow",
    type="object",
    properties={"left": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}},
    additionalProperties=False,
    **{"$defs": {"leaf": {"type": "integer"}}},
)
FREE = {"type": "function", "function": {"name": "stop"}}


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ({"name": "grow", "arguments": {"left": {"left": {"leaf": 1}}}}, True),
        ({"name": "grow", "arguments": {"left": {"left": {"leaf": "x"}}}}, False),
        ({"name": "grow", "arguments": {"right": 1}}, False),
        ({"name": "stop", "arguments": {"anything": 1}}, True),
        ({"name": "stop"}, False),
        ({"name": "other", "arguments": {}}, False),
        ({"name": "stop", "arguments": {}, "more": 1}, False),
    ],
)
def test_only_calls_of_the_tools_fit_also_through_their_references(call, fits):
    assert jsonschema.Draft202012Validator(call_schema([FREE, NODE])).is_valid(call) == fits


def test_the_named_tool_alone_or_all_of_them_may_be_called():
    assert forced_tools([FREE, NODE], None) == [FREE, NODE]
    assert forced_tools([FREE, NODE], "grow") == [NODE]
    for tools, name in (([], None), ([FREE], "grow")):
        with pytest.raises(ApiError):
            forced_tools(tools, name)


def test_a_call_that_was_cut_off_is_text():
    parser = CallParser()
    assert parser.push('{"name": "gr') == []
    assert parser.finish() == [Delta("text", '{"name": "gr')]
