"""How many tokens each row drafts, and whether the draft's context is kept up: asked of a policy.

Exactness does not depend on it: any number of drafted tokens gives the same answer. In a step that has
online rows it is asked about these alone, so that they verify as many tokens as they would without batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from dflash_engine.residency import Residency
from dflash_engine.sequence import SequenceState
from dflash_engine.step_budget import Grant, StepBudget


class DraftCandidate(NamedTuple):
    """A decoding row that could verify up to `most` drafted tokens."""

    request_id: int
    most: int
    missing_context: int = 0
    """Known tokens that would have to be fed again before it can draft; then `most` is 0."""


class DraftChoice(Protocol):
    """What a policy decides for one step."""

    @property
    def num_draft(self) -> tuple[int, ...]:
        """For each candidate, at most its `most`."""
        ...

    @property
    def write_context(self) -> bool:
        """False where the draft's context of this step's tokens is not worth writing."""
        ...


class DraftPolicy(Protocol):
    """Decides from what steps cost and how often drafts are right. Its candidates have the fields of
    `DraftCandidate`; that they are `Any` here lets it name a type of its own."""

    def choose(self, candidates: Sequence[Any], other_tokens: int, /) -> DraftChoice: ...

    def worth_rebuilding(self, candidate: Any, remaining_tokens: int, /) -> bool:
        """Whether feeding `missing_context` tokens again pays over what is left of the answer."""
        ...


class Drafting:
    """The policy's part in planning; with no policy, each row drafts as many tokens as fit."""

    def __init__(self, policy: DraftPolicy | None, block_length: int, max_model_len: int) -> None:
        self._policy = policy
        self._block_length = block_length
        self._last_start = max_model_len - block_length
        self.write_context = True
        """Of the step being planned; where nothing decodes, as in the step before."""

    def most(self, sequence: SequenceState) -> int:
        """Tokens worth drafting behind the anchor: none that max_tokens would cut off.

        The first token is prefill's, also where the prefix cache left one prompt token to compute:
        then a verify step is a step behind the first token, and acceptance lengths compare.
        """
        decodes = sequence.samples_ahead or (sequence.output and sequence.num_left == 1)
        if not decodes or sequence.context_gap is not None or sequence.num_fed > self._last_start:
            return 0
        return max(min(self._block_length, sequence.most_tokens_left) - 1, 0)

    def most_at_once(self, sequence: SequenceState) -> int:
        """For a sequence that comes in after the choice: the policy sees it from the next step on."""
        return self.most(sequence) if self._policy is None else 0

    def most_beside(self, sequence: SequenceState) -> int:
        """For a batch row in a step that has online rows: what is left there is better used than not."""
        return self.most(sequence) if self.write_context else 0

    def choose(self, sequences: Sequence[SequenceState], other_tokens: int) -> list[int]:
        """Tokens to draft for each of these decoding sequences, in a step with `other_tokens` others."""
        most = [self.most(sequence) for sequence in sequences]
        if self._policy is None or not sequences:
            return most
        candidates = [
            DraftCandidate(sequence.seq_id, num, _missing(sequence))
            for sequence, num in zip(sequences, most, strict=True)
        ]
        choice = self._policy.choose(candidates, other_tokens)
        self.write_context = choice.write_context
        assert len(choice.num_draft) == len(most) and all(map(int.__le__, choice.num_draft, most)), choice
        return list(choice.num_draft)

    def consider_rebuilding(self, sequence: SequenceState) -> None:
        """Lets a decoding sequence without whole draft context pause to rebuild it where that pays."""
        if self._policy is None or not self.write_context:
            sequence.rebuilding = False
        elif not sequence.rebuilding:
            candidate = DraftCandidate(sequence.seq_id, 0, _missing(sequence))
            sequence.rebuilding = self._policy.worth_rebuilding(candidate, sequence.most_tokens_left)

    def grant_rebuild(self, sequence: SequenceState, budget: StepBudget) -> None:
        """A chunk of what has to be fed again; not while a sample in flight leaves open how much that is."""
        num_tokens = min(_missing(sequence), budget.left_for_prompts(sequence))
        if num_tokens >= 1 and self.write_context and not sequence.samples_ahead:
            budget.grant_prompt(sequence, num_tokens, rebuild=True)

    def book(self, grant: Grant, residency: Residency) -> None:
        """Keeps the books of the draft context that a planned row writes, or leaves out."""
        sequence, gap = grant.sequence, grant.sequence.context_gap
        if grant.rebuild:
            assert gap is not None and self.write_context, sequence.seq_id
            sequence.rebuilding = gap + grant.num_tokens < sequence.num_fed
            sequence.context_gap = gap + grant.num_tokens if sequence.rebuilding else None
            residency.rebuilt(sequence, gap)
        elif not self.write_context and gap is None:
            sequence.context_gap = sequence.num_fed


def _missing(sequence: SequenceState) -> int:
    return 0 if sequence.context_gap is None else sequence.num_fed - sequence.context_gap
