"""Which sequences wait and which run, and the KV blocks and slots that the running ones hold.

Who owns which positions of one running sequence, with n = num_computed and f = furthest, where the next
row begins at most (the two are the same with nothing in flight):

    0            n // size * size        n            f            f + fed + drafted         draft's block
    |-- full blocks --|-- last computed --|-- in flight --|-- written by this step --|------ reserved ------|
    |   registered,   |                     private to the sequence                                         |
    |   may be shared |     never registered, held by nobody else, so a rejected draft harms none           |

Only positions < n are registered or shared, and a step writes only positions >= n: target KV of the
fed and drafted tokens, and draft KV of the whole draft block. (A row that rebuilds draft context writes
below n what stands there already.) A waiting sequence holds no blocks and has n = 0; what it had computed
before it was preempted is found through the prefix cache.

Rounds run on the device in the order in which they are planned, so blocks and slots may change owners
while a round in flight still writes to them for the old one:

    round k      planned, launched ......... writes block B for a sequence that has ended meanwhile
    the end      of the sequence: B is free (it lies behind what is committed, so it was never registered)
    round k + 1  planned with B for another: runs behind round k, and reads of B only what it wrote itself

A registered block cannot be written that way: a round in flight begins at the device's own count, which
is never below what the host has committed, and registered is only what lies wholly below that.

Lower rank = (priority, arrival) goes first and is preempted last. Waiting sequences are placed strictly
in that order, so within a class all running ones are older than all waiting ones; with a pool that
holds any one sequence, the first in rank can always go on, and no livelock is possible. Preemption waits
until nothing is in flight: what the sequence is to compute again must be known. Where online waits for
blocks or a seat of batch, no other round is launched before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise

from dflash_engine.blocks import BlockAllocator, require
from dflash_engine.request import Priority
from dflash_engine.sequence import SequenceState
from dflash_engine.step_budget import StepBudget


class Residency:
    """Moves sequences between waiting and running, and is the only one that takes or gives blocks."""

    def __init__(self, blocks: BlockAllocator, max_num_seqs: int, block_length: int) -> None:
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._block_length = block_length
        self._slots = list(range(max_num_seqs))
        heapify(self._slots)

    @property
    def max_num_seqs(self) -> int:
        return self._max_num_seqs

    @property
    def block_size(self) -> int:
        return self._blocks.block_size

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    def add(self, sequence: SequenceState) -> None:
        _insert(self.waiting, sequence)

    def first_class(self) -> Priority | None:
        """The class of the first in rank of all; None where there is nobody."""
        return min([queue[0].priority for queue in (self.running, self.waiting) if queue], default=None)

    def online_kinds(self) -> set[bool]:
        """Whether online sequences need the host, of those that run and wait: one, the other, or both."""
        kinds: set[bool] = set()
        for queue in (self.running, self.waiting):
            kinds.update(
                each.needs_host for each in queue[: bisect_right(queue, Priority.ONLINE, key=_priority)]
            )
        return kinds

    def reclass(self, sequence: SequenceState, priority: Priority) -> None:
        """Moves a sequence to another class, to its place by arrival there."""
        queue = self.running if sequence.is_running else self.waiting
        _remove(queue, sequence)
        sequence.priority = priority
        _insert(queue, sequence)

    def num_waiting(self, priority: Priority) -> int:
        """Sequences of a class that wait."""
        waiting = self.waiting
        return bisect_right(waiting, priority, key=_priority) - bisect_left(waiting, priority, key=_priority)

    def num_waiting_tokens(self, priority: Priority, most: int) -> int:
        """Known tokens of a class's waiting sequences that may find a seat and blocks now, up to `most`."""
        seats = self._max_num_seqs - len(self.running)
        watermark = len(self.running) * self._blocks.blocks_for(self._block_length)
        if seats <= 0 or self._blocks.num_free <= watermark:
            return 0
        num_tokens = 0
        for sequence in islice(self.waiting, seats):
            if num_tokens >= most or sequence.priority > priority:
                break
            num_tokens += sequence.num_known if sequence.priority == priority else 0
        return min(num_tokens, most)

    def place(self, sequence: SequenceState, budget: StepBudget) -> bool:
        """Lets the first waiting sequence run, with blocks for all its known tokens; False if it can't.

        Sequences of lower classes give way, but only if that is enough. Behind it, each running
        sequence that does not give way can still grow by a whole draft block; without this
        watermark the next step could preempt what this one admits.
        """
        num_running = len(self.running)
        num_peers = bisect_right(self.running, sequence.priority, key=_priority)
        watermark = num_peers * self._blocks.blocks_for(self._block_length)
        if num_peers >= self._max_num_seqs:
            return False
        # A full pool with a queue is the common case of a batch: no need to look for a prefix then.
        if num_peers == num_running and watermark + 1 > self._blocks.num_free:
            return False
        cached = self._blocks.match_prefix(sequence.known(0, sequence.num_known), sequence.salt)
        missing = self._blocks.blocks_for(sequence.num_known) - len(cached)
        if not self._take_from_lower(sequence, missing + watermark, budget) or not self._free_seat(budget):
            self._blocks.release(cached)
            return False
        size = self._blocks.block_size
        gap = self._blocks.first_without_context(cached)
        sequence.blocks = cached + self._blocks.allocate(missing)
        sequence.slot = heappop(self._slots)
        sequence.num_registered = len(cached)
        sequence.num_computed = len(cached) * size
        sequence.context_gap = None if gap is None else gap * size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
        _remove(self.waiting, sequence)
        _insert(self.running, sequence)
        return True

    def reserve(self, sequence: SequenceState, budget: StepBudget) -> bool:
        """Room for all tokens of a running sequence that are known or in flight, preempting from the end
        of the ranks; False if that may not be yet, or came to be itself."""
        missing = self._missing(sequence, sequence.furthest + sequence.num_left)
        if missing <= 0:
            return True
        if missing > self._blocks.num_free and not budget.may_preempt:
            budget.want_preemption(at_once=sequence.priority < self.running[-1].priority)
            return False
        while missing > self._blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim, budget)
            if victim is sequence:
                return False
        sequence.blocks += self._blocks.allocate(missing)
        return True

    def reserve_draft(self, sequence: SequenceState, budget: StepBudget) -> bool:
        """Room for a whole draft block wherever the next row begins; False if there is none.

        Only lower classes give way: within a class, a step without a draft costs less than computing
        a sequence again. Rounds in flight are waited for only where a lower class can give way, and not at
        once: one step without a draft costs less.
        """
        missing = self._missing(sequence, sequence.furthest + self._block_length)
        if missing <= 0:
            return True
        if missing > self._blocks.num_free and not budget.may_preempt:
            if self._can_take(self._lower(sequence), missing):
                budget.want_preemption(at_once=False)
            return False
        if not self._take_from_lower(sequence, missing, budget):
            return False
        sequence.blocks += self._blocks.allocate(missing)
        return True

    def register(self, sequence: SequenceState) -> None:
        """Offers its newly full computed blocks to the prefix cache."""
        size = self._blocks.block_size
        num_full = sequence.num_computed // size
        gap = sequence.context_gap
        for index in range(sequence.num_registered, num_full):
            parent = sequence.blocks[index - 1] if index else None
            tokens = sequence.known(index * size, (index + 1) * size)
            has_context = gap is None or (index + 1) * size <= gap
            self._blocks.register(sequence.blocks[index], parent, tokens, has_context, sequence.salt)
        sequence.num_registered = num_full

    def rebuilt(self, sequence: SequenceState, begin: int) -> None:
        """The draft context that was missing from `begin` on is planned up to its new gap."""
        size = self._blocks.block_size
        end = sequence.num_computed if sequence.context_gap is None else sequence.context_gap
        self._blocks.complete_context(
            sequence.blocks[begin // size : min(end // size, sequence.num_registered)]
        )

    def forget(self, sequence: SequenceState) -> None:
        """Takes a sequence out, waiting or running, and releases its blocks and its slot."""
        if sequence.is_running:
            _remove(self.running, sequence)
            heappush(self._slots, sequence.slot)
        else:
            _remove(self.waiting, sequence)
        self._blocks.release(sequence.blocks)
        # A new list: rows in flight may still hold the old one.
        sequence.blocks = []
        sequence.slot = -1

    def check_idle(self) -> None:
        """Raises `IntegrityError` where somebody is left, or something is held though nobody is."""
        left = [sequence.seq_id for sequence in (*self.running, *self.waiting)]
        require(not left, f"sequences {left} run or wait in an idle engine")
        require(len(self._slots) == self._max_num_seqs, f"{len(self._slots)} slots are free")
        self._blocks.check_idle()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` that names the sequence or block where the laws above are broken."""
        self._blocks.check_integrity(sequence.blocks for sequence in self.running)
        require(len(self.running) <= self._max_num_seqs, f"{len(self.running)} sequences run")
        slots = sorted([*self._slots, *(sequence.slot for sequence in self.running)])
        require(slots == list(range(self._max_num_seqs)), f"slots {slots} are free or held")
        for queue in (self.waiting, self.running):
            require(all(a.rank < b.rank for a, b in pairwise(queue)), "a queue is out of order")
        last_running = {sequence.priority: sequence for sequence in self.running}
        for seq in self.waiting:
            idle = not seq.blocks and seq.furthest == 0 and not seq.samples_ahead
            require(idle, f"waiting sequence {seq.seq_id} holds blocks or has rows in flight")
            latest = last_running.get(seq.priority)
            # What was held up for too long comes before those of its new class that run already.
            passed = latest is not None and latest.rank > seq.rank and seq.promoted_at is None
            require(not passed, f"sequence {seq.seq_id} waits, though a later one of its class runs")
        for seq in self.running:
            self._check_running(seq)

    def _check_running(self, seq: SequenceState) -> None:
        size = self._blocks.block_size
        name = f"sequence {seq.seq_id} with {seq.num_computed} of {seq.num_known} tokens computed"
        require(seq.num_left >= 1, f"{name} has nothing to feed")
        require(
            bool(seq.blocks) and seq.furthest <= len(seq.blocks) * size,
            f"{name} and up to {seq.furthest} in flight has only {len(seq.blocks)} blocks",
        )
        full = seq.num_computed // size
        require(seq.num_registered == full, f"{name} has {seq.num_registered} blocks registered")
        shared = [b for b in seq.blocks[full:] if not self._blocks.is_private(b)]
        require(not shared, f"{name} would write to blocks {shared}, which others can read")

    def _missing(self, sequence: SequenceState, num_positions: int) -> int:
        return -(-num_positions // self._blocks.block_size) - len(sequence.blocks)

    def _take_from_lower(self, sequence: SequenceState, wanted: int, budget: StepBudget) -> bool:
        """Makes `wanted` blocks free at the cost of lower classes; preempts none if that can't do."""
        if wanted > self._blocks.num_free:
            lower = self._lower(sequence)
            if not self._can_take(lower, wanted):
                return False
            if not budget.may_preempt:
                budget.want_preemption(at_once=True)
                return False
            while wanted > self._blocks.num_free:
                self._preempt(lower.pop(), budget)
        return True

    def _lower(self, sequence: SequenceState) -> list[SequenceState]:
        """Running sequences of lower classes, the first to give way last."""
        return self.running[bisect_right(self.running, sequence.priority, key=_priority) :]

    def _can_take(self, lower: list[SequenceState], wanted: int) -> bool:
        """Whether there are `wanted` blocks without these. Mostly the last few are enough to know."""
        num_asked = 1
        while lower:
            freed = self._blocks.num_freed_by(other.blocks for other in lower[-num_asked:])
            if wanted <= self._blocks.num_free + freed:
                return True
            if num_asked >= len(lower):
                return False
            num_asked *= 2
        return False

    def _free_seat(self, budget: StepBudget) -> bool:
        """A seat for one more, if need be at the cost of the last in rank."""
        if len(self.running) >= self._max_num_seqs:
            if not budget.may_preempt:
                budget.want_preemption(at_once=True)
                return False
            self._preempt(self.running[-1], budget)
        return True

    def _preempt(self, sequence: SequenceState, budget: StepBudget) -> None:
        budget.revoke(sequence)
        self.forget(sequence)
        sequence.num_computed = sequence.num_registered = 0
        sequence.context_gap, sequence.rebuilding = None, False
        _insert(self.waiting, sequence)
        self.num_preemptions += 1


def _rank(sequence: SequenceState) -> tuple[int, int]:
    return sequence.rank


def _priority(sequence: SequenceState) -> Priority:
    return sequence.priority


def _insert(queue: list[SequenceState], sequence: SequenceState) -> None:
    insort(queue, sequence, key=_rank)


def _remove(queue: list[SequenceState], sequence: SequenceState) -> None:
    index = bisect_left(queue, sequence.rank, key=_rank)
    assert queue[index] is sequence, sequence.seq_id
    del queue[index]
