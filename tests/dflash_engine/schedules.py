"""Short ways to drive a scheduler by hand."""

from __future__ import annotations

from typing import Any

from dflash_engine.plan import RowCommit, RowPlan
from dflash_engine.request import Priority, SamplingParams
from dflash_engine.scheduler import Scheduler

ROOMY: dict[str, Any] = {
    "num_blocks": 200,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_step_tokens": 64,
    "max_model_len": 64,
    "block_length": 4,
    "prefix_caching": True,
}
NEXT = 7
"""The token that every sequence says."""


def scheduler(**changes: Any) -> Scheduler:
    return Scheduler(**(ROOMY | changes))


def add(
    engine: Scheduler,
    seq_id: int,
    prompt: int | tuple[int, ...],
    max_tokens: int = 20,
    priority: Priority = Priority.BATCH,
) -> None:
    """A prompt given by its length is like no other."""
    tokens = tuple(range(100 * seq_id, 100 * seq_id + prompt)) if isinstance(prompt, int) else prompt
    engine.add(seq_id, tokens, max_tokens, SamplingParams(), 0, priority)


def plan(engine: Scheduler) -> dict[int, RowPlan]:
    step = engine.plan()
    assert step is not None
    return {row.seq_id: row for row in step.rows}


def commit(
    engine: Scheduler, rows: dict[int, RowPlan], accepted: int = 0, finished: tuple[int, ...] = ()
) -> None:
    """Accepts this many drafted tokens wherever so many were drafted."""
    engine.commit(
        [
            RowCommit(i, (NEXT,) * (min(accepted, row.num_draft) + 1) * row.sample, i in finished)
            for i, row in rows.items()
        ]
    )
    engine.check_integrity()


def step(engine: Scheduler, accepted: int = 0, finished: tuple[int, ...] = ()) -> dict[int, RowPlan]:
    rows = plan(engine)
    commit(engine, rows, accepted, finished)
    return rows


def fed(rows: dict[int, RowPlan]) -> dict[int, tuple[int, int]]:
    return {seq_id: (len(row.tokens), row.num_draft) for seq_id, row in rows.items()}


def tight(**changes: Any) -> Scheduler:
    """Ten blocks of four tokens: one longest sequence and a little."""
    return scheduler(**({"num_blocks": 10, "max_model_len": 32} | changes))
