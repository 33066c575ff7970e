"""KV blocks: who holds which, and which finished ones can be used again as a prefix.

One block id stands for the same slots in the target's pool and in the draft's, so a cached prefix
covers both and a released block frees both. A block is in exactly one of three places:

    held        ref count >= 1: in the table of that many sequences
    evictable   ref count 0, registered: its content is kept until the room is needed, oldest first
    free        ref count 0, not registered: content is never read

Prefixes are found by digests that begin with the sequence's salt, so that sequences of different salts
never share a block, and none learns from its times what another had computed.

A cached prefix always has the target's KV. The draft's is missing in blocks that were computed while
nothing was drafted; such a block says so, and whoever finds it may decode on it but not draft.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

UNSALTED = b""
"""Parent digest of the first block of sequences without a salt."""


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or evictable. Never leaves the scheduler."""


class IntegrityError(AssertionError):
    """The books of scheduler or allocator contradict themselves; says which entry."""


def require(condition: bool, message: str) -> None:
    """Raises `IntegrityError` with the message where the condition does not hold, also under -O."""
    if not condition:
        raise IntegrityError(message)


def salt_digest(salt: str) -> bytes:
    """Parent digest of the first block of sequences with this salt; that of no block, whatever its tokens."""
    if not salt:
        return UNSALTED
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=32, person=b"salt").digest()


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a full block: its tokens and, through the parent's digest, every token before them."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


class BlockAllocator:
    """Reference-counted blocks with ids 0..num_blocks-1, and the prefix cache over them."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: dict[int, None] = {}
        # A digest stands on every full computed block, but only one block can answer for it: a
        # second one with the same content stays private to its sequence.
        self._digests: list[bytes | None] = [None] * num_blocks
        self._registered: dict[bytes, int] = {}
        self._has_context = [False] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: free ones, and cached ones that nobody holds."""
        return len(self._free) + len(self._evictable)

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that hold this many positions."""
        return -(-num_positions // self.block_size)

    def allocate(self, num: int) -> list[int]:
        """Takes private blocks, free ones before cached ones. Raises `OutOfBlocks`, then takes none."""
        if num > self.num_free:
            raise OutOfBlocks(f"{num} blocks wanted, {self.num_free} of {self.num_blocks} to be had")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def match_prefix(self, tokens: Sequence[int], salt: bytes = UNSALTED) -> list[int]:
        """Takes a reference to each cached block of the longest prefix known under this `salt_digest`, and
        returns them.

        Full blocks only, and never the last token: one must be left to compute, since a choice
        needs logits and the cache holds none.
        """
        size = self.block_size
        blocks: list[int] = []
        parent = salt
        for end in range(size, len(tokens), size) if self._registered else ():
            parent = chain_digest(parent, tokens[end - size : end])
            block = self._registered.get(parent)
            if block is None:
                break
            blocks.append(block)
        for block in blocks:
            self._evictable.pop(block, None)
            self._ref_counts[block] += 1
        return blocks

    def register(
        self,
        block: int,
        parent: int | None,
        tokens: Sequence[int],
        has_context: bool = True,
        salt: bytes = UNSALTED,
    ) -> None:
        """Offers a held block, full of computed KV, as a prefix for others.

        `parent` is the block before it in the same table, given to `register` earlier or matched;
        None for the first. A block registered earlier with the same content stays the one offered.
        `has_context` says whether the draft's KV is there too.
        """
        if not self._prefix_caching:
            return
        assert len(tokens) == self.block_size and self._digests[block] is None, block
        above = salt if parent is None else self._digests[parent]
        assert above is not None, f"block {parent} before block {block} has no digest"
        digest = chain_digest(above, tokens)
        self._digests[block] = digest
        self._has_context[block] = has_context
        self._registered.setdefault(digest, block)

    def first_without_context(self, blocks: Sequence[int]) -> int | None:
        """Index of the first of these matched blocks that lacks the draft's KV; None if all have it."""
        return next((index for index, block in enumerate(blocks) if not self._has_context[block]), None)

    def complete_context(self, blocks: Sequence[int]) -> None:
        """The draft's KV of these registered blocks is written too."""
        for block in blocks:
            self._has_context[block] = True

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back one reference to each block of a table, given in order of position.

        The tail goes first: what is used least, and is of no use without its head, is evicted first.
        """
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} was released more often than taken"
            if self._ref_counts[block]:
                continue
            if self._is_registered(block):
                self._evictable[block] = None
            else:
                self._digests[block] = None
                self._free.append(block)

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """Blocks that would come free if all these tables were released."""
        held = Counter(block for table in tables for block in table)
        return sum(self._ref_counts[block] == count for block, count in held.items())

    def is_private(self, block: int) -> bool:
        """True where exactly one sequence holds the block and none can find it: safe to write to."""
        return self._ref_counts[block] == 1 and self._digests[block] is None

    def check_idle(self) -> None:
        """As `check_integrity` where nothing is held, but by counting alone: it walks through no pool."""
        require(
            self.num_free == self.num_blocks,
            f"nothing runs, but {self.num_blocks - self.num_free} of {self.num_blocks} blocks are held",
        )

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises `IntegrityError` where the books do not agree with each other or with these tables,
        which are to be all that is held."""
        held: Counter[int] = Counter()
        for table in tables:
            require(len(set(table)) == len(table), f"a table holds a block twice: {list(table)}")
            held.update(table)
        require(all(0 <= block < self.num_blocks for block in held), f"unknown block in {sorted(held)}")
        free = set(self._free)
        require(len(free) == len(self._free), "a block is in the free list twice")
        for block, count in enumerate(self._ref_counts):
            problem = self._problem(block, block in free, held[block])
            require(not problem, f"block {block} with {count} references {problem}")
        for digest, block in self._registered.items():
            require(self._digests[block] == digest, "a block is registered for content it does not have")
        sizes = (len(free), len(self._evictable), len(held))
        require(
            sum(sizes) == self.num_blocks,
            "{} free, {} evictable and {} held blocks are not {}".format(*sizes, self.num_blocks),
        )

    def _problem(self, block: int, is_free: bool, num_holders: int) -> str:
        count, digest, evictable = self._ref_counts[block], self._digests[block], block in self._evictable
        if count != num_holders:
            return f"is in {num_holders} tables"
        if is_free + evictable + (count > 0) != 1:
            return f"is not in exactly one place: free {is_free}, evictable {evictable}"
        if is_free and digest is not None:
            return "is free, but still has a digest"
        if evictable and not self._is_registered(block):
            return "is kept for reuse, but nobody can find it"
        return ""

    def _is_registered(self, block: int) -> bool:
        digest = self._digests[block]
        return digest is not None and self._registered.get(digest) == block

    def _evict(self) -> int:
        block = next(iter(self._evictable))
        del self._evictable[block]
        digest = self._digests[block]
        assert digest is not None, block
        del self._registered[digest]
        self._digests[block] = None
        return block
