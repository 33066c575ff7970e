"""Which sequences wait and which run, and the KV blocks that the running ones hold.

Who owns which positions of one running sequence, with n = num_computed:

    0            n // size * size        n        n + fed + drafted       room for the draft's block
    |-- full blocks --|-- last computed --|---- written by this step ----|------ reserved ------|
    |   registered,   |                   private to the sequence                               |
    |   may be shared |   never registered, held by nobody else, so a rejected draft harms none |

Only positions < n are registered or shared, and a step writes only positions >= n: target KV of the
fed and drafted tokens, and draft KV of the whole draft block. A waiting sequence holds no blocks and
has n = 0; what it had computed before it was preempted is found through the prefix cache.

Lower rank = (priority, arrival) goes first and is preempted last. Waiting sequences are placed strictly
in that order, so within a class all running ones are older than all waiting ones; with a pool that
holds any one sequence, the first in rank can always go on, and no livelock is possible.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

from dflash_engine.blocks import BlockAllocator, require
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

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    def add(self, sequence: SequenceState) -> None:
        _insert(self.waiting, sequence)

    def place(self, sequence: SequenceState, budget: StepBudget) -> bool:
        """Lets the first waiting sequence run, with blocks for all its known tokens; False if it can't.

        Sequences of lower classes give way, but only if that is enough. Behind it, each running
        sequence that does not give way can still grow by a whole draft block; without this
        watermark the next step could preempt what this one admits.
        """
        num_peers = sum(other.priority <= sequence.priority for other in self.running)
        if num_peers >= self._max_num_seqs:
            return False
        cached = self._blocks.match_prefix(sequence.known(0, sequence.num_known))
        missing = self._blocks.blocks_for(sequence.num_known) - len(cached)
        watermark = num_peers * self._blocks.blocks_for(self._block_length)
        if not self._take_from_lower(sequence, missing + watermark, budget):
            self._blocks.release(cached)
            return False
        if len(self.running) >= self._max_num_seqs:
            self._preempt(self.running[-1], budget)
        sequence.blocks = cached + self._blocks.allocate(missing)
        sequence.num_registered = len(cached)
        sequence.num_computed = len(cached) * self._blocks.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
        _remove(self.waiting, sequence)
        _insert(self.running, sequence)
        return True

    def reserve(self, sequence: SequenceState, budget: StepBudget) -> bool:
        """Room for all known tokens of a running sequence, preempting from the end of the ranks;
        False if that came to be itself."""
        missing = self._blocks.blocks_for(sequence.num_known) - len(sequence.blocks)
        if missing <= 0:
            return True
        while missing > self._blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim, budget)
            if victim is sequence:
                return False
        sequence.blocks += self._blocks.allocate(missing)
        return True

    def reserve_draft(self, sequence: SequenceState, budget: StepBudget) -> bool:
        """Room for a whole draft block behind what is computed; False if there is none.

        Only lower classes give way: within a class, a step without a draft costs less than computing
        a sequence again.
        """
        num_positions = sequence.num_computed + self._block_length
        missing = self._blocks.blocks_for(num_positions) - len(sequence.blocks)
        if missing <= 0:
            return True
        if not self._take_from_lower(sequence, missing, budget):
            return False
        sequence.blocks += self._blocks.allocate(missing)
        return True

    def register(self, sequence: SequenceState) -> None:
        """Offers its newly full computed blocks to the prefix cache."""
        size = self._blocks.block_size
        for index in range(sequence.num_registered, sequence.num_computed // size):
            parent = sequence.blocks[index - 1] if index else None
            tokens = sequence.known(index * size, (index + 1) * size)
            self._blocks.register(sequence.blocks[index], parent, tokens)
        sequence.num_registered = sequence.num_computed // size

    def forget(self, sequence: SequenceState) -> None:
        """Takes a sequence out, waiting or running, and releases its blocks."""
        _remove(self.running if sequence.is_running else self.waiting, sequence)
        self._blocks.release(sequence.blocks)
        sequence.blocks = []

    def check_integrity(self) -> None:
        """Raises `IntegrityError` that names the sequence or block where the laws above are broken."""
        self._blocks.check_integrity(sequence.blocks for sequence in self.running)
        size = self._blocks.block_size
        require(len(self.running) <= self._max_num_seqs, f"{len(self.running)} sequences run")
        for queue in (self.waiting, self.running):
            require(all(a.rank < b.rank for a, b in pairwise(queue)), "a queue is out of order")
        last_running = {sequence.priority: sequence for sequence in self.running}
        for seq in self.waiting:
            require(not seq.blocks and seq.num_computed == 0, f"waiting sequence {seq.seq_id} holds blocks")
            latest = last_running.get(seq.priority)
            passed = latest is not None and latest.rank > seq.rank
            require(not passed, f"sequence {seq.seq_id} waits, though a later one of its class runs")
        for seq in self.running:
            name = f"sequence {seq.seq_id} with {seq.num_computed} of {seq.num_known} tokens computed"
            require(seq.num_left >= 1, f"{name} has nothing to feed")
            require(
                bool(seq.blocks) and seq.num_computed <= len(seq.blocks) * size,
                f"{name} has only {len(seq.blocks)} blocks",
            )
            full = seq.num_computed // size
            require(seq.num_registered == full, f"{name} has {seq.num_registered} blocks registered")
            shared = [b for b in seq.blocks[full:] if not self._blocks.is_private(b)]
            require(not shared, f"{name} would write to blocks {shared}, which others can read")

    def _take_from_lower(self, sequence: SequenceState, wanted: int, budget: StepBudget) -> bool:
        """Makes `wanted` blocks free at the cost of lower classes; preempts none if that can't do."""
        if wanted > self._blocks.num_free:
            lower = [other for other in self.running if other.priority > sequence.priority]
            freed = self._blocks.num_freed_by(other.blocks for other in lower)
            if wanted > self._blocks.num_free + freed:
                return False
            while wanted > self._blocks.num_free:
                self._preempt(lower.pop(), budget)
        return True

    def _preempt(self, sequence: SequenceState, budget: StepBudget) -> None:
        budget.revoke(sequence.seq_id)
        self.forget(sequence)
        sequence.num_computed = sequence.num_registered = 0
        _insert(self.waiting, sequence)
        self.num_preemptions += 1


def _rank(sequence: SequenceState) -> tuple[int, int]:
    return sequence.rank


def _insert(queue: list[SequenceState], sequence: SequenceState) -> None:
    insort(queue, sequence, key=_rank)


def _remove(queue: list[SequenceState], sequence: SequenceState) -> None:
    index = bisect_left(queue, sequence.rank, key=_rank)
    assert queue[index] is sequence, sequence.seq_id
    del queue[index]
