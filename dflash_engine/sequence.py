"""One sequence as the scheduler sees it: its tokens, how far they are computed, and its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    arrival: int
    """Order of `add`; kept through preemption."""
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading known tokens whose KV is in both pools."""
    num_registered: int = 0
    """Leading blocks that are full of computed KV and were offered to the prefix cache."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it."""
    last_favoured: int = 0
    """Grows each time it gets more of a scarce budget than another of its class."""

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
    def num_left(self) -> int:
        """Known tokens still to be fed; 1 in steady decode (the anchor)."""
        return self.num_known - self.num_computed

    def known(self, begin: int, end: int) -> tuple[int, ...]:
        """Committed tokens at positions [begin, end)."""
        split = len(self.prompt)
        answer = self.output[max(begin - split, 0) : max(end - split, 0)]
        return self.prompt[begin:end] + tuple(answer)
