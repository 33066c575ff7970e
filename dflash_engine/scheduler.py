"""Decides what each step computes: continuous batching, chunked prefill, drafts, admission.

    plan = scheduler.plan();  output = runner.execute(plan);  scheduler.commit(rows kept of output)

`commit` moves num_computed over what was fed and accepted, and only then are newly full blocks
offered as prefixes. Who owns which positions is drawn in residency.py.

With `rounds_ahead` rounds planned before earlier ones are committed, those are in flight: sequence.py
draws what is known of a sequence then. What needs exact knowledge (preemption) waits until nothing is
in flight, and `plan` gives None until then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from dflash_engine.batch_room import BatchShare
from dflash_engine.blocks import BlockAllocator, require, salt_digest
from dflash_engine.drafting import Drafting, DraftPolicy
from dflash_engine.errors import ConfigError
from dflash_engine.plan import RowCommit, RowPlan, StepPlan
from dflash_engine.request import Priority, SamplingParams
from dflash_engine.residency import Residency
from dflash_engine.sequence import SequenceState
from dflash_engine.starvation import Starvation
from dflash_engine.step_budget import Grant, PromptLimit
from dflash_engine.step_filling import StepFilling


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
        rounds_ahead: int = 0,
        draft_policy: DraftPolicy | None = None,
        prompt_limit: PromptLimit | None = None,
        share: BatchShare | None = None,
        batch_starvation_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` where the pool cannot hold one sequence of the longest kind.

        `rounds_ahead` is how many rounds may be uncommitted when the next one is planned; `prompt_limit` is
        for prompts in a step in which others decode; `share` is what batch may have of a step with online
        rows, None: all that is left. Batch that has stood still for `batch_starvation_s` because of online is
        treated as online until it has a new token.
        """
        assert min(max_num_seqs, max_step_tokens, block_length) >= 1 and max_model_len >= 2
        # A round planned ahead may draft behind drafts in flight, past the longest answer.
        overhang = (1 + rounds_ahead) * block_length
        needed = -(-(max_model_len + overhang) // block_size)
        if num_blocks < needed:
            times = f"{1 + rounds_ahead} x " if rounds_ahead else ""
            raise ConfigError(
                f"the KV cache holds {num_blocks * block_size} tokens, but one sequence may need "
                f"{needed * block_size} (max_model_len {max_model_len} + {times}block_length {block_length}, "
                f"in blocks of {block_size}): raise kv_cache_tokens to that, or lower max_model_len"
            )
        self._max_model_len = max_model_len
        self._rounds_ahead = rounds_ahead
        allocator = BlockAllocator(num_blocks, block_size, prefix_caching)
        self._residency = Residency(allocator, max_num_seqs, block_length)
        self._drafting = Drafting(draft_policy, block_length, max_model_len)
        limit = prompt_limit or PromptLimit(max_step_tokens)
        self._filling = StepFilling(self._residency, self._drafting, max_step_tokens, limit, share)
        self._share = share
        self._starvation: Starvation | None = None
        if batch_starvation_s is not None:
            self._starvation = Starvation(self._residency, batch_starvation_s, clock)
        self._rounds_without_aside = 0
        self._sequences: dict[int, SequenceState] = {}
        self._uncommitted: deque[dict[int, Grant]] = deque()
        self._draining = False
        self._host_next = False
        self._num_arrivals = 0
        self._num_on_host = 0

    def add(
        self,
        seq_id: int,
        prompt: tuple[int, ...],
        max_tokens: int,
        sampling: SamplingParams,
        seed: int,
        priority: Priority,
        cache_salt: str = "",
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
            salt=salt_digest(cache_salt),
            needs_host=self._rounds_ahead > 0 and sampling.needs_host,
        )
        self._num_on_host += sequence.needs_host
        self._sequences[seq_id] = sequence
        self._residency.add(sequence)

    def plan(self) -> StepPlan | None:
        """The next step; None when there is nothing to do before another commit, or at all.

        At most `rounds_ahead` plans may be uncommitted. Class by class, anchors of all decoding sequences
        come first, so that no prefill holds up a stream; then drafts, chunks of prompts, and admission with
        what is left. Sequences that need the host have steps of their own, in turn with the others.
        """
        in_flight = len(self._uncommitted)
        assert in_flight <= self._rounds_ahead, f"{in_flight} plans are not committed"
        if not self._sequences or (self._draining and in_flight):
            return None
        due: Set[int] = frozenset()
        if self._starvation is not None:
            self._starvation.look()
            due = self._starvation.due
        blocked = []
        turns, online_kind = self._turns()
        for on_host in turns:
            kind = on_host if self._num_on_host else None
            aside = online_kind is not None and on_host != online_kind
            budget = self._filling.fill(kind, may_preempt=not in_flight, aside=aside, due=due)
            if budget.preemption_wanted:
                blocked.append(on_host)
            if budget.is_urgent:
                # What it was granted, it gets in the next plan, which preempts.
                self._host_next, self._draining = on_host, True
                return None
            if budget.grants:
                break
        self._rounds_without_aside = 0 if aside else self._rounds_without_aside + 1
        # Who waits for the others to drain goes first then, or it might find them in flight again.
        self._host_next = blocked[0] if blocked else not on_host
        self._draining = bool(blocked)
        if not budget.grants:
            assert in_flight, "sequences are left, but none can go on"
            return None
        self._uncommitted.append(budget.grants)
        rows = tuple([self._launched(grant) for grant in budget.grants.values()])
        return StepPlan(rows, self._drafting.write_context, on_host)

    def commit(self, commits: Sequence[RowCommit]) -> None:
        """Takes over what is kept of each row of the oldest uncommitted plan.

        Every row is named exactly once, but for those of sequences that have ended since they were
        planned: these are thrown away. A row that sampled keeps at least one token unless it is
        finished; one that did not keeps none. A finished sequence is forgotten and its blocks are
        released.
        """
        grants = self._uncommitted.popleft()
        live = [seq_id for seq_id, grant in grants.items() if self._is_live(grant.sequence)]
        assert sorted([row.seq_id for row in commits]) == sorted(live), "rows are not the plan's"
        size = self._residency.block_size
        for row in commits:
            grant = grants[row.seq_id]
            sequence, num_kept = grant.sequence, len(row.tokens)
            most = 1 + grant.num_draft if grant.sample else 0
            assert num_kept <= most and (row.finished or bool(num_kept) == grant.sample), row
            if not grant.rebuild:
                sequence.tokens_ahead -= grant.num_tokens
                sequence.num_computed += grant.num_tokens
            if grant.sample:
                sequence.samples_ahead -= 1
                sequence.drafts_ahead -= grant.num_draft
                sequence.output.extend(row.tokens)
                sequence.num_computed += max(num_kept - 1, 0)
            assert row.finished or len(sequence.output) < sequence.max_tokens, row
            if sequence.num_computed >= (sequence.num_registered + 1) * size:
                self._residency.register(sequence)
            if row.finished:
                self._forget(sequence)

    def abort(self, seq_id: int) -> None:
        """Forgets a waiting or running sequence and releases its blocks, also while it is in flight:
        its rows in uncommitted plans are thrown away."""
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

    def check_idle(self) -> None:
        """As `check_integrity` of a scheduler without sequences, in no time: a lone request ends in it."""
        require(not self._sequences, f"sequences {sorted(self._sequences)} are known in an idle engine")
        self._residency.check_idle()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` that names the sequence or block whose books are wrong."""
        queued = sorted(s.seq_id for s in (*self._residency.waiting, *self._residency.running))
        known = sorted(self._sequences)
        require(queued == known, f"sequences {queued} wait or run, but {known} are known")
        self._residency.check_integrity()

    def _turns(self) -> tuple[tuple[bool, ...], bool | None]:
        """Whether the step is one for sequences that need the host: what to try, in order; and of which of
        the two kinds all online sequences are, if batch has others.

        Then the other kind, which is of batch alone, has its turn after so many steps that it costs online
        no more than batch rows in these would.
        """
        if self._num_on_host in (0, len(self._sequences)):
            return (self._num_on_host > 0,), None
        kinds = self._residency.online_kinds()
        if len(kinds) != 1 or self._share is None:
            return (self._host_next, not self._host_next), None
        (first,) = kinds
        turn = first != (self._rounds_without_aside >= self._share.rounds_between)
        return (turn, not turn), first

    def _is_live(self, sequence: SequenceState) -> bool:
        return self._sequences.get(sequence.seq_id) is sequence

    def _forget(self, sequence: SequenceState) -> None:
        self._residency.forget(sequence)
        if self._starvation is not None:
            self._starvation.forget(sequence)
        self._num_on_host -= sequence.needs_host
        del self._sequences[sequence.seq_id]

    def _launched(self, grant: Grant) -> RowPlan:
        """The row of a grant, which is in flight from here on."""
        sequence = grant.sequence
        ahead = sequence.samples_ahead > 0
        start = sequence.num_computed + sequence.tokens_ahead
        if grant.rebuild:
            assert sequence.context_gap is not None
            start = sequence.context_gap
        row = RowPlan(
            sequence.seq_id,
            start,
            () if ahead else sequence.known(start, start + grant.num_tokens),
            grant.num_draft,
            grant.sample,
            sequence.blocks,
            sequence.sampling,
            sequence.seed,
            sequence.prompt,
            sequence.output,
            sequence.slot,
            ahead,
            grant.rebuild,
        )
        self._drafting.book(grant, self._residency)
        if not grant.rebuild:
            sequence.tokens_ahead += grant.num_tokens
        if grant.sample:
            sequence.samples_ahead += 1
            sequence.drafts_ahead += grant.num_draft
        return row
