"""Who gets which part of a step's budget: the order in which running and waiting sequences are served.

Online is served as if there were no batch. Batch has what is left, as far as that hardly lengthens the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from operator import attrgetter

from dflash_engine.batch_room import BatchShare, RoundSize
from dflash_engine.drafting import Drafting
from dflash_engine.request import Priority
from dflash_engine.residency import Residency
from dflash_engine.sequence import SequenceState
from dflash_engine.step_budget import PromptLimit, StepBudget, share_evenly

CROWD = 8
"""Sequences that wait or are prefilled: with so many, getting them all to decode soon is worth longer steps
for those that do already."""

_PRIORITY = attrgetter("priority")


class StepFilling:
    """Fills one budget after the other, and remembers whose turn it is where one was too small."""

    def __init__(
        self,
        residency: Residency,
        drafting: Drafting,
        max_step_tokens: int,
        prompt_limit: PromptLimit,
        share: BatchShare | None = None,
    ) -> None:
        """`share` says what batch may have of a step that has online rows; None: all that is left."""
        self._residency = residency
        self._drafting = drafting
        self._max_step_tokens = max_step_tokens
        self._prompt_limit = prompt_limit
        self._share = share
        self._largest: RoundSize | None = None
        self._num_favours = 0

    def fill(
        self, on_host: bool | None, *, may_preempt: bool, aside: bool = False, due: Set[int] = frozenset()
    ) -> StepBudget:
        """Grants of one step: for sequences that need the host, for those that don't, or (None) for all.

        A step `aside` has batch alone and stands between two of online: it is no larger than these may be.
        What is `due` of batch is served with online.
        """
        decoding, feeding = self._sort_out(on_host)
        budget = StepBudget(self._max_step_tokens, may_preempt=may_preempt)
        if self._residency.first_class() == Priority.ONLINE:
            online, decoding = _split(decoding, due)
            fed, feeding = _split(feeding, due)
            self._serve(budget, Priority.ONLINE, on_host, online, fed)
        if budget.grants:
            self._serve_beside(budget, on_host, decoding, feeding)
        else:
            if aside and self._largest is not None:
                budget.narrow(self._largest)
            self._serve(budget, Priority.BATCH, on_host, decoding, feeding)
        return budget

    def _serve(
        self,
        budget: StepBudget,
        priority: Priority,
        on_host: bool | None,
        decoding: list[SequenceState],
        feeding: list[SequenceState],
    ) -> None:
        """A class whose rows make the step what it is."""
        granted = self._begin(budget, priority, on_host, decoding, feeding)
        if granted and len(feeding) + self._residency.num_waiting(priority) < CROWD:
            budget.limit_prompts(self._prompt_limit, len(granted))
        known_left = sum([sequence.num_left for sequence in feeding])
        num_draft = self._drafting.choose(granted, min(known_left, budget.left_for_prompts()))
        wants = [want for want in zip(granted, num_draft, strict=True) if want[1]]
        self._go_on(budget, priority, on_host, wants, feeding)

    def _serve_beside(
        self,
        budget: StepBudget,
        on_host: bool | None,
        decoding: list[SequenceState],
        feeding: list[SequenceState],
    ) -> None:
        """Batch in a step that has online rows: the policy has chosen for these, and is not asked again."""
        most = RoundSize(self._max_step_tokens, self._residency.max_num_seqs, self._residency.max_num_seqs)
        num_drafting = most.num_drafting
        if self._share is not None:
            online = budget.size
            largest = self._share.largest(online, most, with_context=self._drafting.write_context)
            budget.narrow(largest)
            self._largest = largest
            num_drafting = largest.num_drafting - online.num_drafting
        if not budget.is_full:
            budget.limit_prompts(self._prompt_limit, budget.size.num_rows)
            granted = self._begin(budget, Priority.BATCH, on_host, decoding, feeding)
            drafting = sorted(granted, key=_turn)[:num_drafting] if len(granted) > num_drafting else granted
            wants = [
                (sequence, num) for sequence in drafting if (num := self._drafting.most_beside(sequence))
            ]
            self._go_on(budget, Priority.BATCH, on_host, wants, feeding)

    def _begin(
        self,
        budget: StepBudget,
        priority: Priority,
        on_host: bool | None,
        decoding: list[SequenceState],
        feeding: list[SequenceState],
    ) -> list[SequenceState]:
        """The turn of a class, with its anchors; gives those that got theirs."""
        budget.keep_for(None)
        budget.keep_for(self._first_pending(budget, priority, on_host, decoding, feeding))
        return self._grant_anchors(budget, decoding)

    def _go_on(
        self,
        budget: StepBudget,
        priority: Priority,
        on_host: bool | None,
        wants: list[tuple[SequenceState, int]],
        feeding: list[SequenceState],
    ) -> None:
        """What a class has behind its anchors: drafts, chunks of prompts, and who comes in."""
        if wants:
            self._grant_drafts(budget, wants, budget.left() - self._kept(budget, feeding, priority))
        self._grant_chunks(budget, feeding)
        self._admit(budget, priority, on_host)

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
        self,
        budget: StepBudget,
        priority: Priority,
        on_host: bool | None,
        decoding: Sequence[SequenceState],
        feeding: Sequence[SequenceState],
    ) -> SequenceState | None:
        """Whom one token is kept for, so that anchors and drafts of its class cannot hold it up for ever.

        The first in rank that is not decoding; a waiting one only if a lower class is running or it was
        held up for too long, and where one token is left only if no decoding one goes before it.
        """
        running, waiting = self._residency.running, self._residency.waiting
        pending = list(feeding[:1])
        if (
            self._is_next(waiting, on_host)
            and waiting[0].priority == priority
            and (not running or priority < running[-1].priority or self._is_held_up(waiting[0], budget))
        ):
            pending.append(waiting[0])
        first = min(pending, key=lambda sequence: sequence.rank, default=None)
        if first is None or (budget.left() == 1 and decoding and decoding[0].rank < first.rank):
            return None
        return first

    def _grant_anchors(self, budget: StepBudget, decoding: list[SequenceState]) -> list[SequenceState]:
        """Those that got their anchor, in order of rank."""
        rows_left = budget.rows_left()
        num = budget.left() if rows_left is None else min(budget.left(), rows_left)
        in_turn = sorted(decoding, key=_turn)[:rows_left] if len(decoding) > num else decoding
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

    def _is_held_up(self, sequence: SequenceState, budget: StepBudget) -> bool:
        """Of batch, made online. It may find no place: its token must not be the only one."""
        return sequence.promoted_at is not None and budget.left() > 1

    def _favour(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            self._num_favours += 1
            sequence.last_favoured = self._num_favours


def _split(ranked: list[SequenceState], due: Set[int]) -> tuple[list[SequenceState], list[SequenceState]]:
    """Online, with what is due of batch, and the rest of batch, of a list in order of rank."""
    first_batch = bisect_left(ranked, Priority.BATCH, key=_PRIORITY)
    online, batch = ranked[:first_batch], ranked[first_batch:]
    if due:
        online += [sequence for sequence in batch if sequence.seq_id in due]
        batch = [sequence for sequence in batch if sequence.seq_id not in due]
    return online, batch


def _turn(sequence: SequenceState) -> tuple[int, int]:
    """Order in which a scarce budget is handed out: to whoever was favoured longest ago."""
    return (sequence.last_favoured, sequence.arrival)
