"""Thoughts, text and calls are told apart, wherever the pieces of a stream are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.service.dialect import Dialect
from pipelines.service.output import Delta, OutputParser, ToolCall

JSON = Dialect(thinks=True, tools="json")
XML = Dialect(tools="xml")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx <y>\nz\n</parameter>\n"
    "</function>\n</tool_call>"
)


def read(pieces, dialect=JSON, **settings):
    """Kinds and texts of an answer, pieces of a kind in a row together."""
    parser = OutputParser(dialect, **{"has_tools": True, **settings})
    found = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        if isinstance(part, ToolCall):
            found.append((part.name, json.loads(part.arguments)))
        elif found and found[-1][0] == part.kind:
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("Yes.", [("text", "Yes.")]),
        ("a < b <tool and </think>", [("text", "a < b <tool and </think>")]),
        ("<think>\nHm\n</think>\n\nYes.", [("thinking", "Hm"), ("text", "Yes.")]),
        ("<think>never ends", [("thinking", "never ends")]),
        ("<think>\n\n</think>\n\nYes.", [("text", "Yes.")]),
        ("No <think> here", [("text", "No <think> here")]),
        (f"Look.\n{CALL}", [("text", "Look."), ("f", {"a": 1})]),
        (f"{CALL}\n{CALL}", [("f", {"a": 1}), ("f", {"a": 1})]),
        (f"<think>x</think>{CALL}", [("thinking", "x"), ("f", {"a": 1})]),
        ("<tool_call>nonsense</tool_call>", [("text", "<tool_call>nonsense</tool_call>")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a',
            [("text", '<tool_call>{"name": "f", "arguments": {"a')],
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', [("f", {})]),
    ],
)
def test_each_part_is_what_it_is_whole_and_letter_by_letter(text, found):
    assert read([text]) == found
    assert read(list(text)) == found


def test_calls_in_xml_have_json_values_where_they_read_as_json():
    expected = [("f", {"a": 1, "b": "x <y>\nz"})]
    assert read([XML_CALL], XML) == expected
    assert read(list(XML_CALL), XML) == expected


def test_thoughts_begun_by_the_prompt_end_at_their_mark():
    assert read(["Hm</think>Yes"], thinking=True) == [("thinking", "Hm"), ("text", "Yes")]


def test_without_tools_a_call_is_text_and_white_space_stays():
    text = f" \n{CALL} \n"
    assert read([text], Dialect(tools="json"), has_tools=False) == [("text", text)]


def test_one_call_ends_the_answer_where_only_one_is_wanted():
    assert read([CALL + CALL + "more"], single_call=True) == [("f", {"a": 1})]


@given(
    text=st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", "{}", CALL, "<", "a", " ", "\n"]
        ),
        max_size=12,
    ).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    thinking=st.booleans(),
    has_tools=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_where_a_stream_is_cut_changes_nothing(text, cuts, thinking, has_tools):
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    options = {"thinking": thinking, "has_tools": has_tools}
    assert read(pieces, **options) == read([text], **options)


@given(text=st.text(alphabet="<>/think tool_cal\n{}", max_size=60))
@settings(max_examples=300, deadline=None)
def test_a_plain_model_without_tools_says_every_letter(text):
    parser = OutputParser(Dialect())
    parts = [part for letter in text for part in parser.push(letter)] + parser.finish()
    assert "".join(part.text for part in parts if isinstance(part, Delta)) == text
