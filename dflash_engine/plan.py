"""Values between scheduler, runner and engine: what one step does, and what came of it.

One row of a step feeds the tokens at positions [start, start + len(tokens)) of one sequence and,
behind them, `num_draft` drafted ones. Who owns which positions of a sequence's KV slots:

    [0, start)                          committed: KV of target and draft are final; full blocks may be shared
    [start, start + len(tokens))        written by this step, final once it is committed
    [.., start + len(tokens) + draft)   speculative: private blocks only; final up to the accepted prefix
    behind that, to the last block      reserved or free, never read
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_engine.request import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One sequence's part of a step."""

    seq_id: int
    start: int
    """Position of the first token fed; KV before it is in the cache."""
    tokens: tuple[int, ...]
    """Known tokens to feed: a prefill chunk, or the anchor alone."""
    num_draft: int
    """Tokens to draft and verify behind the anchor; 0 while prefilling."""
    sample: bool
    """False for a prefill chunk that does not reach the last known token."""
    block_table: tuple[int, ...]
    """KV block ids of the sequence, with room for the whole draft block."""
    sampling: SamplingParams
    seed: int
    prompt: Sequence[int]
    output: Sequence[int]
    """Tokens committed so far, for penalties; not to be changed by the reader."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    rows: tuple[RowPlan, ...]


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What the target chose for one row."""

    seq_id: int
    tokens: tuple[int, ...]
    """Accepted drafted tokens and then the target's own next token; empty where not sampled."""
    num_drafted: int
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token where the request asked for them."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    rows: tuple[RowOutput, ...]


@dataclass(frozen=True, slots=True)
class RowCommit:
    """What is kept of a row: the engine has looked for stops and cut there."""

    seq_id: int
    tokens: tuple[int, ...]
    finished: bool
