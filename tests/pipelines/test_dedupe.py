"""Which rows have the same answer by rule."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_engine.request import Message, Request, SamplingParams
from pipelines.dedupe import group
from pipelines.rows import InputRow, RowError


def row(text: str = "hi", role: str = "user", *, number: int = 0, **sampling: Any) -> InputRow:
    request = Request(
        messages=(Message(role, text),), sampling=SamplingParams(**sampling), request_id=f"f:{number}"
    )
    return InputRow(row_id=f"f:{number}", offset=number, raw=b"", request=request, carried={"n": number})


def test_greedy_rows_copy_the_first_of_them_whatever_they_carry():
    rows = [row(number=0), row("other", number=1), row(number=2), row(number=3, seed=5)]
    assert group(rows) == [0, 1, 0, 0]


def test_sampled_rows_are_the_same_only_with_the_same_seed():
    rows = [
        row(temperature=0.5),
        row(temperature=0.5),
        *(row(temperature=0.5, seed=seed) for seed in (1, 2, 1)),
    ]
    assert group(rows) == [0, 1, 2, 3, 2]


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 3},
        {"stop": ("x",)},
        {"stop_token_ids": (1,)},
        {"logit_bias": {1: 2.0}},
        {"repetition_penalty": 1.1},
        {"logprobs": 0},
        {"ignore_eos": True},
    ],
)
def test_every_parameter_decides(sampling: dict[str, Any]):
    assert group([row(), row(**sampling), row(**sampling)]) == [0, 1, 1]


def test_role_and_form_of_the_prompt_decide():
    text = InputRow(row_id="f:0", offset=0, raw=b"", request=Request(text="hi"))
    ids = InputRow(row_id="f:0", offset=0, raw=b"", request=Request(token_ids=(1, 2)))
    rows = [row(), row(role="system"), text, ids, text, ids, row()]
    assert group(rows) == [0, 1, 2, 3, 2, 3, 0]


def test_the_order_of_biases_does_not_matter():
    assert group([row(logit_bias={1: 1, 2: 2}), row(logit_bias={2: 2, 1: 1})]) == [0, 0]


def test_bad_rows_are_nobodys_copies():
    bad = InputRow(row_id="f:0", offset=0, raw=b"", error=RowError("invalid_json", "why"))
    assert group([bad, bad, row()]) == [0, 1, 2]
    assert group([]) == []
