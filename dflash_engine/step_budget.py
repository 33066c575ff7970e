"""What one step may take while it is planned: query tokens granted to whom, and what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_engine.batch_room import RoundSize
from dflash_engine.sequence import SequenceState

LEAST_CHUNK = 16
"""Of a prompt in a step that has room for it, however long it is."""


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Of prompts in a step in which others decode: a long one would hold them up."""

    num_tokens: int
    """Together with the anchors of those who decode; a quarter of it is for prompts in any case."""
    span: float = math.inf
    """Positions behind which a token counts as two: it attends to all that is before it."""


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

    Nobody is preempted unless `may_preempt`: what a preempted sequence is to compute again is known only
    with nothing in flight.
    """

    def __init__(self, num_tokens: int, *, may_preempt: bool) -> None:
        self.grants: dict[int, Grant] = {}
        self.may_preempt = may_preempt
        self.preemption_wanted = False
        """Somebody was left out who could only go on by preempting another."""
        self.is_urgent = False
        """It was online that waits for batch: this step is better not taken."""
        self._left = num_tokens
        self._prompts_left = num_tokens
        self._num_prompt_tokens = 0
        self._span = math.inf
        self._most_rows: int | None = None
        self._kept_for: SequenceState | None = None

    @property
    def size(self) -> RoundSize:
        """What is granted so far."""
        grants = self.grants.values()
        num_tokens = sum([grant.num_tokens + grant.num_draft for grant in grants])
        return RoundSize(num_tokens, len(grants), sum([grant.num_draft > 0 for grant in grants]))

    @property
    def is_full(self) -> bool:
        """Nobody else can get anything."""
        return self._left < 1 or self.rows_left() == 0

    def keep_for(self, sequence: SequenceState | None) -> None:
        """One token is for this one alone until it has a grant; to be said for each class."""
        self._kept_for = sequence

    def narrow(self, largest: RoundSize) -> None:
        """From here on the whole step may have no more tokens and rows than these."""
        self._left = min(self._left, largest.num_tokens - self.size.num_tokens)
        self._prompts_left = self._left
        self._most_rows = largest.num_rows

    def want_preemption(self, *, at_once: bool) -> None:
        self.preemption_wanted = True
        self.is_urgent |= at_once

    def rows_left(self) -> int | None:
        """Sequences that may still get a grant; None where only tokens are counted."""
        return None if self._most_rows is None else max(self._most_rows - len(self.grants), 0)

    def left(self, sequence: SequenceState | None = None) -> int:
        """Query tokens that this sequence may still get, or those that anyone may."""
        kept_for = self._kept_for
        if kept_for is None or kept_for is sequence or kept_for.seq_id in self.grants:
            return self._left
        return self._left - 1

    def limit_prompts(self, limit: PromptLimit, num_anchors: int) -> None:
        """At most so many tokens of prompts in the step, with those granted already."""
        num_tokens = max(limit.num_tokens - num_anchors, limit.num_tokens // 4)
        self._prompts_left = max(num_tokens - self._num_prompt_tokens, 0)
        self._span = limit.span

    def left_for_prompts(self, sequence: SequenceState | None = None) -> int:
        """As `left`, for known tokens that are fed by the chunk."""
        if self._most_rows is not None and len(self.grants) >= self._most_rows:
            return 0
        most = self._prompts_left
        if sequence is not None and sequence.num_computed:
            most = max(int(most / self._weight(sequence)), min(most, LEAST_CHUNK))
        return min(self.left(sequence), most)

    def grant_prompt(self, sequence: SequenceState, num_tokens: int, *, rebuild: bool = False) -> None:
        """A chunk of a prompt."""
        self.grant(sequence, num_tokens, rebuild=rebuild)
        counted = math.ceil(num_tokens * self._weight(sequence))
        self._prompts_left = max(self._prompts_left - counted, 0)
        self._num_prompt_tokens += counted

    def _weight(self, sequence: SequenceState) -> float:
        return 1 + sequence.num_computed / self._span

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
