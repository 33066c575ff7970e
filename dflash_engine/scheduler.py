"""Decides what each step computes: continuous batching, chunked prefill, drafts, admission.

    plan = scheduler.plan();  output = runner.execute(plan);  scheduler.commit(rows kept of output)

`commit` moves num_computed over what was fed and accepted, and only then are newly full blocks
offered as prefixes. Who owns which positions is drawn in residency.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_engine.blocks import BlockAllocator, require
from dflash_engine.errors import ConfigError
from dflash_engine.plan import RowCommit, RowPlan, StepPlan
from dflash_engine.request import Priority, SamplingParams
from dflash_engine.residency import Residency
from dflash_engine.sequence import SequenceState
from dflash_engine.step_budget import Grant, StepBudget, share_evenly


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    waiting: int
    running: int
    free_blocks: int
    """Blocks that a sequence could get: free, or cached and held by nobody."""
    preemptions: int
    """Since construction."""


class Scheduler:
    """Owns every sequence from `add` to its last commit, and every KV block."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int,
        block_length: int,
        prefix_caching: bool,
    ) -> None:
        """Raises `ConfigError` where the pool cannot hold one sequence of the longest kind."""
        assert min(max_num_seqs, max_step_tokens, block_length) >= 1 and max_model_len >= 2
        needed = -(-(max_model_len + block_length) // block_size)
        if num_blocks < needed:
            raise ConfigError(
                f"the KV cache holds {num_blocks * block_size} tokens, but one sequence may need "
                f"{needed * block_size} (max_model_len {max_model_len} + block_length {block_length}, in "
                f"blocks of {block_size}): raise kv_cache_tokens to that, or lower max_model_len"
            )
        self._max_step_tokens = max_step_tokens
        self._max_model_len = max_model_len
        self._block_length = block_length
        allocator = BlockAllocator(num_blocks, block_size, prefix_caching)
        self._residency = Residency(allocator, max_num_seqs, block_length)
        self._sequences: dict[int, SequenceState] = {}
        self._planned: dict[int, Grant] = {}
        self._num_arrivals = 0
        self._num_favours = 0

    def add(
        self,
        seq_id: int,
        prompt: tuple[int, ...],
        max_tokens: int,
        sampling: SamplingParams,
        seed: int,
        priority: Priority,
    ) -> None:
        """Puts a sequence in the queue of its class. `max_tokens` is capped to the model's length."""
        assert seq_id not in self._sequences and prompt and max_tokens >= 1, seq_id
        assert len(prompt) + 1 <= self._max_model_len, (len(prompt), self._max_model_len)
        self._num_arrivals += 1
        sequence = SequenceState(
            seq_id=seq_id,
            prompt=prompt,
            max_tokens=min(max_tokens, self._max_model_len - len(prompt)),
            sampling=sampling,
            seed=seed,
            priority=priority,
            arrival=self._num_arrivals,
        )
        self._sequences[seq_id] = sequence
        self._residency.add(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, to be committed before the next call; None when there is nothing to do.

        Anchors of all decoding sequences come first, so that no prefill holds up a stream; then,
        class by class, drafts, chunks of prompts, and admission with what is left.
        """
        assert not self._planned, "the last plan is not committed"
        if not self._sequences:
            return None
        budget = StepBudget(self._max_step_tokens, kept_for=self._first_pending())
        self._grant_anchors(budget)
        for priority in Priority:
            self._grant_drafts(budget, priority)
            self._grant_chunks(budget, priority)
            self._admit(budget, priority)
        assert budget.grants, "sequences are left, but none can go on"
        self._planned = budget.grants
        return StepPlan(tuple(self._row(seq_id, grant) for seq_id, grant in budget.grants.items()))

    def commit(self, commits: Sequence[RowCommit]) -> None:
        """Takes over what is kept of each row of the last plan; every row is named exactly once.

        A row that sampled keeps at least one token unless it is finished; one that did not keeps
        none. A finished sequence is forgotten and its blocks are released.
        """
        assert sorted(row.seq_id for row in commits) == sorted(self._planned), "rows are not the plan's"
        for row in commits:
            sequence, grant = self._sequences[row.seq_id], self._planned[row.seq_id]
            most = 1 + grant.num_draft if grant.num_tokens == sequence.num_left else 0
            assert len(row.tokens) <= most and (row.finished or bool(row.tokens) == bool(most)), row
            sequence.output.extend(row.tokens)
            sequence.num_computed += grant.num_tokens + max(len(row.tokens) - 1, 0)
            assert row.finished or len(sequence.output) < sequence.max_tokens, row
            self._residency.register(sequence)
            if row.finished:
                self._forget(sequence)
        self._planned = {}

    def abort(self, seq_id: int) -> None:
        """Forgets a waiting or running sequence and releases its blocks.

        Not between plan and commit: a planned row is ended by committing it as finished.
        """
        assert not self._planned, "the last plan is not committed"
        self._forget(self._sequences[seq_id])

    def cached_tokens(self, seq_id: int) -> int:
        """Prompt tokens taken from the prefix cache at first admission, 0 before it.

        To be asked before the commit that finishes the sequence.
        """
        return self._sequences[seq_id].cached_tokens or 0

    def stats(self) -> SchedulerStats:
        residency = self._residency
        return SchedulerStats(
            waiting=len(residency.waiting),
            running=len(residency.running),
            free_blocks=residency.num_free_blocks,
            preemptions=residency.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` that names the sequence or block whose books are wrong."""
        queued = sorted(s.seq_id for s in (*self._residency.waiting, *self._residency.running))
        known = sorted(self._sequences)
        require(queued == known, f"sequences {queued} wait or run, but {known} are known")
        self._residency.check_integrity()

    def _first_pending(self) -> int | None:
        """Whom one token is kept for, so that anchors and drafts cannot hold it up for ever.

        The first in rank that is not decoding; a waiting one only if a lower class is running, and
        of a budget of one token only if no decoding one goes before it.
        """
        running, waiting = self._residency.running, self._residency.waiting
        pending = [sequence for sequence in running if sequence.num_left > 1][:1]
        if waiting and (not running or waiting[0].priority < running[-1].priority):
            pending.append(waiting[0])
        first = min(pending, key=lambda sequence: sequence.rank, default=None)
        if first is None or (self._max_step_tokens == 1 and running and running[0].rank < first.rank):
            return None
        return first.seq_id

    def _grant_anchors(self, budget: StepBudget) -> None:
        decoding = [sequence for sequence in self._residency.running if sequence.num_left == 1]
        if len(decoding) > budget.left():
            decoding.sort(key=_turn)
        for sequence in decoding:
            if budget.left() < 1:
                break
            # One before it may have preempted it.
            if sequence.is_running and self._residency.reserve(sequence, budget):
                budget.grant(sequence.seq_id, 1)
        granted = [sequence for sequence in decoding if sequence.seq_id in budget.grants]
        if len(granted) < len(decoding):
            self._favour(granted)

    def _grant_drafts(self, budget: StepBudget, priority: Priority) -> None:
        running = self._residency.running
        rows = [s for s in running if s.seq_id in budget.grants and s.priority == priority]
        rows.sort(key=_turn)
        wants = [self._draft_wanted(sequence) for sequence in rows]
        shares = share_evenly(wants, budget.left())
        least = min((share for share, want in zip(shares, wants, strict=True) if share < want), default=None)
        for sequence, share in zip(rows, shares, strict=True):
            if share and self._residency.reserve_draft(sequence, budget):
                budget.grant_draft(sequence.seq_id, share)
        if least is not None:
            self._favour([s for s, share in zip(rows, shares, strict=True) if share > least])

    def _grant_chunks(self, budget: StepBudget, priority: Priority) -> None:
        for sequence in self._residency.running:
            num_tokens = min(sequence.num_left, budget.left(sequence.seq_id))
            if sequence.priority == priority and sequence.num_left > 1 and num_tokens >= 1:
                budget.grant(sequence.seq_id, num_tokens)

    def _admit(self, budget: StepBudget, priority: Priority) -> None:
        waiting = self._residency.waiting
        while waiting and waiting[0].priority == priority:
            sequence = waiting[0]
            if budget.left(sequence.seq_id) < 1 or not self._residency.place(sequence, budget):
                return
            budget.grant(sequence.seq_id, min(sequence.num_left, budget.left(sequence.seq_id)))
            num_draft = min(self._draft_wanted(sequence), budget.left())
            if num_draft and self._residency.reserve_draft(sequence, budget):
                budget.grant_draft(sequence.seq_id, num_draft)

    def _draft_wanted(self, sequence: SequenceState) -> int:
        """Tokens worth drafting behind the anchor: none that max_tokens would cut off.

        The first token is prefill's, also where the prefix cache left one prompt token to compute:
        then a verify step is a step behind the first token, and acceptance lengths compare.
        """
        fits = sequence.num_computed + self._block_length <= self._max_model_len
        if sequence.num_left != 1 or not sequence.output or not fits:
            return 0
        return min(self._block_length, sequence.max_tokens - len(sequence.output)) - 1

    def _forget(self, sequence: SequenceState) -> None:
        self._residency.forget(sequence)
        del self._sequences[sequence.seq_id]

    def _favour(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            self._num_favours += 1
            sequence.last_favoured = self._num_favours

    def _row(self, seq_id: int, grant: Grant) -> RowPlan:
        sequence = self._sequences[seq_id]
        start = sequence.num_computed
        return RowPlan(
            seq_id=seq_id,
            start=start,
            tokens=sequence.known(start, start + grant.num_tokens),
            num_draft=grant.num_draft,
            sample=grant.num_tokens == sequence.num_left,
            block_table=tuple(sequence.blocks),
            sampling=sequence.sampling,
            seed=sequence.seed,
            prompt=sequence.prompt,
            output=sequence.output,
        )


def _turn(sequence: SequenceState) -> tuple[int, int, int]:
    """Order in which a scarce budget is handed out: by class, then whoever was favoured longest ago."""
    return (sequence.priority, sequence.last_favoured, sequence.arrival)
