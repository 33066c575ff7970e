"""Rows that begin alike go to the engine one after the other."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_engine.request import Message, Request
from pipelines.prefix_order import prefix_order
from pipelines.rows import InputRow, RowError

TURNS = st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=4)


def row(**prompt: Any) -> InputRow:
    return InputRow(row_id="f:0", offset=0, raw=b"", request=Request(**prompt))


def chat(*turns: str, system: str | None = None) -> InputRow:
    first = () if system is None else (Message("system", system),)
    said = [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(turns)]
    return row(messages=(*first, *said))


def test_a_conversation_comes_before_those_that_continue_it():
    rows = [chat("x"), chat("hello", "hi", "and?"), chat("y"), chat("hello"), chat("hello", "hi", "again")]
    order = prefix_order(rows)
    assert [index for index in order if index not in (0, 2)] == [3, 4, 1]
    assert order.index(1) - order.index(3) == 2


def test_rows_with_one_system_message_are_together():
    rows = [chat(str(number), system="even" if number % 2 == 0 else "odd") for number in range(6)]
    systems = [rows[index].request.messages[0].content for index in prefix_order(rows)]
    assert systems == ["even"] * 3 + ["odd"] * 3


def test_equal_prompts_keep_their_order():
    assert prefix_order([chat("b"), chat("a"), chat("b"), chat("a")]) == [1, 3, 0, 2]


def test_prompts_of_all_forms_and_bad_rows_are_in_the_order_once():
    bad = InputRow(row_id="f:1", offset=1, raw=b"", error=RowError("invalid_json", "why"))
    rows = [bad, row(token_ids=(2, 1)), row(text="b"), chat("a"), row(token_ids=(1, 9)), row(text="a"), bad]
    assert prefix_order(rows) == [3, 5, 2, 4, 1, 0, 6]
    assert prefix_order([]) == []


@settings(deadline=None)
@given(chats=st.lists(TURNS, max_size=20))
def test_every_prefix_is_one_run(chats: list[list[str]]):
    order = prefix_order([chat(*turns) for turns in chats])
    assert sorted(order) == list(range(len(chats)))
    sorted_chats = [tuple(chats[index]) for index in order]
    for prefix in {turns[:length] for turns in sorted_chats for length in range(len(turns) + 1)}:
        places = [place for place, turns in enumerate(sorted_chats) if turns[: len(prefix)] == prefix]
        assert places == list(range(places[0], places[0] + len(places)))
