"""Who gets which part of a step's budget: the order in which running and waiting sequences are served."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_engine.drafting import Drafting
from dflash_engine.request import Priority
from dflash_engine.residency import Residency
from dflash_engine.sequence import SequenceState
from dflash_engine.step_budget import StepBudget, share_evenly

CROWD = 8
"""Sequences that wait or are prefilled: with so many, getting them all to decode soon is worth longer steps
for those that do already."""


class StepFilling:
    """Fills one budget after the other, and remembers whose turn it is where one was too small."""

    def __init__(
        self, residency: Residency, drafting: Drafting, max_step_tokens: int, max_mixed_tokens: int
    ) -> None:
        """`max_mixed_tokens`: of prompts, in a step in which others decode; a long one would hold them up."""
        self._residency = residency
        self._drafting = drafting
        self._max_step_tokens = max_step_tokens
        self._max_mixed_tokens = max_mixed_tokens
        self._num_favours = 0

    def fill(self, on_host: bool | None, *, may_preempt: bool) -> StepBudget:
        """Grants of one step: for sequences that need the host, for those that don't, or (None) for all."""
        decoding, feeding = self._sort_out(on_host)
        kept_for = self._first_pending(decoding, feeding, on_host)
        budget = StepBudget(self._max_step_tokens, kept_for, may_preempt=may_preempt)
        granted = self._grant_anchors(budget, decoding)
        known_left = sum([sequence.num_left for sequence in feeding])
        if granted and len(feeding) + len(self._residency.waiting) < CROWD:
            budget.limit_prompts(self._max_mixed_tokens)
        num_draft = self._drafting.choose(granted, min(known_left, budget.left_for_prompts()))
        wants = [want for want in zip(granted, num_draft, strict=True) if want[1]]
        for priority in Priority:
            drafting = [want for want in wants if want[0].priority == priority]
            fed = [sequence for sequence in feeding if sequence.priority == priority]
            if drafting:
                self._grant_drafts(budget, drafting, budget.left() - self._kept(budget, fed, priority))
            self._grant_chunks(budget, fed)
            self._admit(budget, priority, on_host)
        return budget

    def _sort_out(self, on_host: bool | None) -> tuple[list[SequenceState], list[SequenceState]]:
        """Running sequences that decode, and those that feed known tokens, in order of rank.

        A sequence that the rounds in flight are certain to end is neither.
        """
        decoding: list[SequenceState] = []
        feeding: list[SequenceState] = []
        for sequence in self._residency.running:
            if on_host is not None and sequence.needs_host != on_host:
                continue
            if sequence.num_left > 1:
                feeding.append(sequence)
                continue
            if sequence.samples_ahead and not sequence.most_tokens_left:
                continue
            if sequence.context_gap is not None:
                self._drafting.consider_rebuilding(sequence)
            (feeding if sequence.rebuilding else decoding).append(sequence)
        return decoding, feeding

    def _first_pending(
        self, decoding: Sequence[SequenceState], feeding: Sequence[SequenceState], on_host: bool | None
    ) -> SequenceState | None:
        """Whom one token is kept for, so that anchors and drafts cannot hold it up for ever.

        The first in rank that is not decoding; a waiting one only if a lower class is running, and
        of a budget of one token only if no decoding one goes before it.
        """
        running, waiting = self._residency.running, self._residency.waiting
        pending = list(feeding[:1])
        if self._is_next(waiting, on_host) and (not running or waiting[0].priority < running[-1].priority):
            pending.append(waiting[0])
        first = min(pending, key=lambda sequence: sequence.rank, default=None)
        if first is None or (self._max_step_tokens == 1 and decoding and decoding[0].rank < first.rank):
            return None
        return first

    def _grant_anchors(self, budget: StepBudget, decoding: list[SequenceState]) -> list[SequenceState]:
        """Those that got their anchor, in order of rank."""
        in_turn = sorted(decoding, key=_turn) if len(decoding) > budget.left() else decoding
        for sequence in in_turn:
            if budget.left() < 1:
                break
            # One before it may have preempted it.
            if sequence.is_running and self._residency.reserve(sequence, budget):
                budget.grant(sequence, 1)
        granted = [sequence for sequence in decoding if sequence.seq_id in budget.grants]
        if len(granted) < len(decoding):
            self._favour([sequence for sequence in in_turn if sequence.seq_id in budget.grants])
        return granted

    def _kept(self, budget: StepBudget, fed: Sequence[SequenceState], priority: Priority) -> int:
        """Tokens that drafts of a class leave to its prompts: at most half of what there is. A prompt that
        waits is a row that does not decode yet."""
        most = min(budget.left() // 2, budget.left_for_prompts())
        waiting = self._residency.num_waiting_tokens(priority, most)
        return min(sum([sequence.num_left for sequence in fed]) + waiting, most)

    def _grant_drafts(self, budget: StepBudget, wants: list[tuple[SequenceState, int]], most: int) -> None:
        """Drafts of one class: all that is wanted, or even shares of `most` tokens, in turn."""
        wants = [want for want in wants if want[0].seq_id in budget.grants]
        if sum([num for _, num in wants]) <= most:
            for sequence, num_draft in wants:
                if self._residency.reserve_draft(sequence, budget):
                    budget.grant_draft(sequence, num_draft)
            return
        wants.sort(key=lambda want: _turn(want[0]))
        shares = share_evenly([num for _, num in wants], most)
        shared = [(sequence, want, share) for (sequence, want), share in zip(wants, shares, strict=True)]
        least = min((share for _, want, share in shared if share < want), default=0)
        for sequence, _, share in shared:
            if share and self._residency.reserve_draft(sequence, budget):
                budget.grant_draft(sequence, share)
        self._favour([sequence for sequence, _, share in shared if share > least])

    def _grant_chunks(self, budget: StepBudget, feeding: Sequence[SequenceState]) -> None:
        for sequence in feeding:
            if not sequence.is_running:
                continue
            if sequence.rebuilding:
                self._drafting.grant_rebuild(sequence, budget)
                continue
            num_tokens = min(sequence.num_left, budget.left_for_prompts(sequence))
            if num_tokens >= 1:
                budget.grant_prompt(sequence, num_tokens)

    def _admit(self, budget: StepBudget, priority: Priority, on_host: bool | None) -> None:
        waiting = self._residency.waiting
        while self._is_next(waiting, on_host) and waiting[0].priority == priority:
            sequence = waiting[0]
            if budget.left_for_prompts(sequence) < 1 or not self._residency.place(sequence, budget):
                return
            budget.grant_prompt(sequence, min(sequence.num_left, budget.left_for_prompts(sequence)))
            num_draft = min(self._drafting.most_at_once(sequence), budget.left())
            if num_draft and self._residency.reserve_draft(sequence, budget):
                budget.grant_draft(sequence, num_draft)

    def _is_next(self, waiting: Sequence[SequenceState], on_host: bool | None) -> bool:
        """Nobody overtakes the first in the queue: those behind one of the other kind wait for its turn."""
        return bool(waiting) and (on_host is None or waiting[0].needs_host == on_host)

    def _favour(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            self._num_favours += 1
            sequence.last_favoured = self._num_favours


def _turn(sequence: SequenceState) -> tuple[int, int, int]:
    """Order in which a scarce budget is handed out: by class, then whoever was favoured longest ago."""
    return (sequence.priority, sequence.last_favoured, sequence.arrival)
