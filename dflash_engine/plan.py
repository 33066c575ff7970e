"""Values between scheduler, runner and engine: what one step does, and what came of it.

One row of a step feeds `num_tokens` known tokens of one sequence from its start on and, behind them,
`num_draft` drafted ones. Who owns which positions of a sequence's KV slots:

    [0, start)                          committed: KV of target and draft are final; full blocks may be shared
    [start, start + num_tokens)         written by this step, final once it is committed
    [.., start + num_tokens + draft)    speculative: private blocks only; final up to the accepted prefix
    behind that, to the last block      reserved or free, never read

A row planned `ahead` begins where the rounds in flight leave its sequence. The host knows only that this
is at `start` or up to as many positions behind it as those rounds drafted; the device knows exactly.

Rows come by the hundred in each step: they are named tuples, which are made several times as fast as
frozen dataclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dflash_engine.request import SamplingParams, TokenLogprob


class RowPlan(NamedTuple):
    """One sequence's part of a step."""

    seq_id: int
    start: int
    """Position of the first token fed, KV before it is in the cache; the least it can be if `ahead`."""
    tokens: tuple[int, ...]
    """Known tokens to feed: a prefill chunk, or the anchor alone. Empty if `ahead`."""
    num_draft: int
    """Tokens to draft and verify behind the anchor; 0 while prefilling."""
    sample: bool
    """False for a prefill chunk that does not reach the last known token."""
    block_table: Sequence[int]
    """KV block ids of the sequence, with room for the whole draft block wherever the row may begin.

    It is the scheduler's own list, which grows with later plans; not to be changed by the reader.
    """
    sampling: SamplingParams
    seed: int
    prompt: Sequence[int]
    output: Sequence[int]
    """Tokens committed so far, for penalties; not to be changed by the reader. Grows with each commit."""
    slot: int = 0
    """Row of the runner's state by sequence, held as long as the sequence is running; below max_num_seqs."""
    ahead: bool = False
    """True where an earlier round that samples for this sequence is not committed: its anchor is the last
    token that this round gives, and only the device knows which it is, and where."""
    rebuild: bool = False
    """True where known tokens are fed again for the draft's context: the same KV is written once more,
    also into shared blocks, and how far the sequence is does not change."""

    @property
    def num_tokens(self) -> int:
        """Known tokens that are fed."""
        return 1 if self.ahead else len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    rows: tuple[RowPlan, ...]
    write_context: bool = True
    """False where the draft's context of what is fed is left out."""
    on_host: bool = False
    """True where the host takes part in the choice of these rows, so that no round can be in flight."""


class RowOutput(NamedTuple):
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
    """One for each row of the plan, in its order."""
    busy_ns: int | None = None
    """Device time of the round where rounds overlap with the host, none of it counted in another round as
    well; None: the time that the step took."""


class RowCommit(NamedTuple):
    """What is kept of a row: the engine has looked for stops and cut there."""

    seq_id: int
    tokens: tuple[int, ...]
    finished: bool
