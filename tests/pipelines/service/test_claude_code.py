"""What Claude Code sends beside the plain API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipelines.service.scripted import MODEL, TOOLS, world

BILLING = "x-anthropic-billing-header: cc_version=2.1.208; cc_entrypoint=cli; cch={};"
TOOL: Any = {"name": "Read", "input_schema": {"type": "object"}, "eager_input_streaming": True}


@pytest.fixture(scope="module")
def here():
    with world(dialect=TOOLS) as made:
        yield made


def turns_of(here, **body):
    ask = {"model": MODEL, "max_tokens": 10, **body}
    answer = here.http.post("/v1/messages?beta=true", json=ask, headers={"anthropic-beta": "x-2099"})
    assert answer.status_code == 200, answer.text
    return [(turn["role"], turn["content"]) for turn in here.letters.seen[-1][0]]


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": BILLING.format("1f")}, {"type": "text", "text": "You are a tool."}],
        f"{BILLING.format('2e')}\nYou are a tool.",
        [{"type": "text", "text": f"{BILLING.format('3d')}\nYou are a tool."}],
    ],
    ids=["block", "string", "first-line"],
)
def test_the_billing_line_is_taken_out_and_nothing_else(here, system):
    assert turns_of(here, messages=[USER], system=system)[0] == ("system", "You are a tool.")


def test_a_prompt_that_only_quotes_the_billing_line_keeps_it(here):
    quoted = f"Strip this line:\n{BILLING.format('4c')}"
    assert turns_of(here, messages=[USER], system=quoted)[0] == ("system", quoted)


def test_a_system_turn_among_the_others_stays_in_its_place(here):
    messages = [
        {"role": "system", "content": "First."},
        USER,
        {"role": "assistant", "content": "Hello"},
        {"role": "system", "content": [{"type": "text", "text": "Now be brief."}]},
        {"role": "user", "content": "Go on"},
    ]
    assert turns_of(here, messages=messages, system="Base.") == [
        ("system", "Base.\n\nFirst."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("system", "Now be brief."),
        ("user", "Go on"),
    ]


def test_a_system_turn_behind_the_user_is_said_in_the_users_turn_now_and_one_turn_later(here):
    first = [USER, {"role": "system", "content": "Note."}]
    later = [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "More"}]
    assert turns_of(here, messages=first) == [("user", "Hi\n\nNote.")]
    assert turns_of(here, messages=later)[: len(first) - 1] == [("user", "Hi\n\nNote.")]


def test_a_turn_with_tool_results_and_text_keeps_their_order(here):
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "text", "text": "Reading"},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "none", "cache_control": {"type": "ephemeral"}}],
                },
                {"type": "text", "text": "Try b"},
            ],
        },
        {"role": "system", "content": "Hurry."},
    ]
    turns = turns_of(here, messages=messages, tools=[TOOL], thinking={"type": "adaptive"})
    assert turns == [
        ("user", "Hi"),
        ("assistant", "Reading"),
        ("tool", "Error: none"),
        ("user", "Try b\n\nHurry."),
    ]
    said = here.letters.seen[-1][0][1]
    assert said["reasoning_content"] == "Hm"
    assert said["tool_calls"][0]["function"] == {"name": "Read", "arguments": {"path": "a"}}


@pytest.mark.parametrize(("method", "path"), [("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/api/hello")])
def test_the_probe_is_answered(here, method, path):
    assert here.http.request(method, path).status_code == 200


def test_unknown_fields_of_a_beta_are_ignored_and_others_refused(here):
    ask = {"model": MODEL, "max_tokens": 10, "messages": [USER], "novelty": 1}
    assert here.http.post("/v1/messages", json=ask).status_code == 400
    beta = here.http.post("/v1/messages", json=ask, headers={"anthropic-beta": "novelty-2099"})
    assert beta.status_code == 200
