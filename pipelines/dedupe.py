"""Rows of a shard whose answers are the same by rule: one is computed, the others copy it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from dflash_engine.request import Request
from pipelines.rows import InputRow


def group(rows: Sequence[InputRow]) -> list[int]:
    """For each row the index of the row that computes its answer: its own, or an earlier one's.

    Two rows are the same where prompt and sampling parameters are, and where no seed or the same one decides:
    a greedy answer has none, and rows that name none get each their own.
    """
    first: dict[Any, int] = {}
    return [
        index if (key := _key(row.request)) is None else first.setdefault(key, index)
        for index, row in enumerate(rows)
    ]


def _key(request: Request | None) -> Any:
    """Everything that decides the answer; None where no other row can have the same one."""
    if request is None:
        return None
    sampling = request.sampling
    if not sampling.greedy and sampling.seed is None:
        return None
    values = sampling.model_dump(exclude={"seed"} if sampling.greedy else None)
    decided = orjson.dumps(values, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return decided, request.messages, request.text, request.token_ids
