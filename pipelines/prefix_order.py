"""The order in which the rows of a shard go to the engine: those that begin alike together.

A prefix cache keeps the blocks of a prompt only for a while. Rows of one conversation, or with one system
message, find each other's blocks where they come one after the other. The output keeps the input's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_engine.request import Request
from pipelines.rows import InputRow


def prefix_order(rows: Sequence[InputRow]) -> list[int]:
    """Indexes of all rows: sorted by their prompts, turn by turn; those without a request come last.

    A conversation comes right before those that continue it. Equal prompts keep their order.
    """
    return sorted(range(len(rows)), key=lambda index: _prefix(rows[index].request))


def _prefix(request: Request | None) -> tuple[int, Sequence[Any]]:
    """What the prompt begins with; prompts of different forms have nothing to compare."""
    if request is None:
        return 3, ()
    if request.messages is not None:
        return 0, [text for turn in request.messages for text in (turn.role, turn.content)]
    return (1, request.text) if request.text is not None else (2, request.token_ids or ())
