"""One sequence as the scheduler sees it: its tokens, how far they are computed, and its blocks.

Positions while rounds are in flight, that is planned and not committed:

    0              num_computed           num_fed              furthest
    |-- committed ----|-- fed in flight ----|-- drafted in flight --|
    |                 |   certain to stand  |   stands or not       |

The next row begins somewhere in [num_fed, furthest]. With nothing in flight the three are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_engine.blocks import UNSALTED
from dflash_engine.request import Priority, SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState:
    """Mutable, and changed by the scheduler alone."""

    seq_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    priority: Priority
    """Its class now: of batch that was held up for too long, online for a while."""
    arrival: int
    """Order of `add`; kept through preemption."""
    needs_host: bool = False
    """Its tokens are chosen with the host's help, so none of its rounds can be planned ahead."""
    salt: bytes = UNSALTED
    """Digest of what its cached blocks are found by, beside their tokens."""
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    """Row of the runner's state while running; -1 while waiting."""
    num_computed: int = 0
    """Leading known tokens whose KV is in both pools, but for the draft's behind `context_gap`."""
    num_registered: int = 0
    """Leading blocks that are full of computed KV and were offered to the prefix cache."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it."""
    last_favoured: int = 0
    """Grows each time it gets more of a scarce budget than another of its class."""
    tokens_ahead: int = 0
    """Known tokens fed by rounds in flight."""
    drafts_ahead: int = 0
    """Tokens drafted by rounds in flight."""
    samples_ahead: int = 0
    """Rounds in flight that give it at least one token each."""
    context_gap: int | None = None
    """First position whose draft context is missing, counting what rounds in flight write."""
    rebuilding: bool = False
    """It does not decode until the missing context is written."""
    promoted_at: int | None = None
    """Tokens of output that it had when it was made online although it is of batch; None where it was not."""
    stood_at: int = -1
    """`num_fed` when it was last seen to have gone on, and when that was; for `Starvation` alone."""
    stood_since_s: float = 0.0

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is served first and preempted last."""
        return (self.priority, self.arrival)

    @property
    def is_running(self) -> bool:
        """Running sequences hold blocks from the moment they are placed; waiting ones never do."""
        return bool(self.blocks)

    @property
    def num_known(self) -> int:
        """Committed tokens: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def num_fed(self) -> int:
        """Where its next row begins at least."""
        return self.num_computed + self.tokens_ahead

    @property
    def furthest(self) -> int:
        """Where its next row begins at most."""
        return self.num_computed + self.tokens_ahead + self.drafts_ahead

    @property
    def num_left(self) -> int:
        """Tokens still to be fed behind the rounds in flight; 1 in steady decode (the anchor)."""
        if self.samples_ahead:
            return 1
        return len(self.prompt) + len(self.output) - self.num_computed - self.tokens_ahead

    @property
    def most_tokens_left(self) -> int:
        """Tokens that it can still be given behind the rounds in flight; 0 if these are certain to end it."""
        return max(self.max_tokens - len(self.output) - self.samples_ahead, 0)

    def known(self, begin: int, end: int) -> tuple[int, ...]:
        """Committed tokens at positions [begin, end)."""
        split = len(self.prompt)
        if begin >= split:
            return tuple(self.output[begin - split : end - split])
        return self.prompt[begin:end] + tuple(self.output[: max(end - split, 0)])
