"""What one step may take while it is planned: query tokens granted to whom, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_engine.sequence import SequenceState


@dataclass(slots=True, eq=False)
class Grant:
    """One sequence's part of the step."""

    sequence: SequenceState
    num_tokens: int
    """Known tokens to feed."""
    sample: bool
    """Whether they reach the last known token."""
    rebuild: bool = False
    """They were fed before, and are fed again for the draft's context."""
    num_draft: int = 0


class StepBudget:
    """Grants of the step being planned; together at most `num_tokens` query tokens.

    One token is kept for the sequence `kept_for` until it has a grant. Nobody is preempted unless
    `may_preempt`: what a preempted sequence is to compute again is known only with nothing in flight.
    """

    def __init__(self, num_tokens: int, kept_for: SequenceState | None, *, may_preempt: bool) -> None:
        self.grants: dict[int, Grant] = {}
        self.may_preempt = may_preempt
        self.preemption_wanted = False
        """Somebody was left out who could only go on by preempting another."""
        self._left = num_tokens
        self._prompts_left = num_tokens
        self._kept_for = kept_for

    def left(self, sequence: SequenceState | None = None) -> int:
        """Query tokens that this sequence may still get, or those that anyone may."""
        kept_for = self._kept_for
        if kept_for is None or kept_for is sequence or kept_for.seq_id in self.grants:
            return self._left
        return self._left - 1

    def limit_prompts(self, num_tokens: int) -> None:
        """From here on at most so many tokens of prompts."""
        self._prompts_left = num_tokens

    def left_for_prompts(self, sequence: SequenceState | None = None) -> int:
        """As `left`, for known tokens that are fed by the chunk."""
        return min(self.left(sequence), self._prompts_left)

    def grant_prompt(self, sequence: SequenceState, num_tokens: int, *, rebuild: bool = False) -> None:
        """A chunk of a prompt."""
        self.grant(sequence, num_tokens, rebuild=rebuild)
        self._prompts_left -= num_tokens

    def grant(self, sequence: SequenceState, num_tokens: int, *, rebuild: bool = False) -> None:
        assert sequence.seq_id not in self.grants and 1 <= num_tokens <= self.left(sequence), sequence.seq_id
        sample = not rebuild and num_tokens == sequence.num_left
        self.grants[sequence.seq_id] = Grant(sequence, num_tokens, sample, rebuild)
        self._left -= num_tokens

    def grant_draft(self, sequence: SequenceState, num_draft: int) -> None:
        """Adds drafted tokens to a sequence whose anchor is granted."""
        assert num_draft <= self.left(sequence), sequence.seq_id
        self.grants[sequence.seq_id].num_draft = num_draft
        self._left -= num_draft

    def revoke(self, sequence: SequenceState) -> None:
        """Takes back what a sequence was granted, if anything."""
        grant = self.grants.pop(sequence.seq_id, None)
        if grant is not None:
            self._left += grant.num_tokens + grant.num_draft


def share_evenly(wants: Sequence[int], num: int) -> list[int]:
    """Shares of `num`, none above its want, as equal as they can be; the first ones get the rest."""
    if sum(wants) <= num:
        return list(wants)
    shares = [0] * len(wants)
    for level in range(max(wants)):
        for index, want in enumerate(wants):
            if num and want > level:
                shares[index] += 1
                num -= 1
    return shares
