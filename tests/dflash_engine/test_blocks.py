"""The block allocator and the prefix cache over it."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array

import pytest

from dflash_engine.blocks import (
    UNSALTED,
    BlockAllocator,
    IntegrityError,
    OutOfBlocks,
    chain_digest,
    salt_digest,
)


def computed(allocator: BlockAllocator, tokens: list[int], salt: bytes = UNSALTED) -> list[int]:
    """A table whose full blocks are registered, as a sequence with these tokens would hold it."""
    size = allocator.block_size
    blocks = allocator.match_prefix(tokens, salt)
    known = len(blocks)
    blocks += allocator.allocate(allocator.blocks_for(len(tokens)) - known)
    for index in range(known, len(tokens) // size):
        parent = blocks[index - 1] if index else None
        allocator.register(blocks[index], parent, tokens[index * size : (index + 1) * size], salt=salt)
    return blocks


def test_blocks_are_handed_out_once_and_come_back() -> None:
    allocator = BlockAllocator(5, 4, prefix_caching=True)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert allocator.num_free == 0
    allocator.check_integrity([first, second])
    allocator.release(first)
    assert allocator.num_free == 2
    assert sorted(allocator.allocate(2)) == sorted(first)


def test_an_idle_pool_has_all_its_blocks_back_whether_cached_or_not() -> None:
    allocator = BlockAllocator(5, 2, prefix_caching=True)
    held = computed(allocator, [1, 2, 3])
    with pytest.raises(IntegrityError, match="2 of 5 blocks are held"):
        allocator.check_idle()
    allocator.release(held)
    allocator.check_idle()


def test_asking_for_too_many_blocks_takes_none() -> None:
    allocator = BlockAllocator(3, 4, prefix_caching=True)
    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 3 of 3"):
        allocator.allocate(4)
    assert allocator.num_free == 3
    allocator.check_integrity([])


def test_a_prefix_is_found_while_held_and_after_release() -> None:
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    held = computed(allocator, [1, 2, 3, 4, 5])
    assert allocator.match_prefix([1, 2, 3, 4, 9]) == held[:2]
    allocator.release(held[:2])
    allocator.release(held)
    assert allocator.num_free == 8
    assert allocator.match_prefix([1, 2, 9, 9, 9]) == held[:1]
    allocator.check_integrity([held[:1]])


def test_a_prefix_is_found_under_its_own_salt_alone() -> None:
    allocator = BlockAllocator(9, 2, prefix_caching=True)
    tables = {salt: computed(allocator, [1, 2, 3, 4, 5], salt_digest(salt)) for salt in ("", "one", "two")}
    assert len({block for table in tables.values() for block in table}) == 9
    for salt, table in tables.items():
        assert allocator.match_prefix([1, 2, 3, 4, 9], salt_digest(salt)) == table[:2]
    assert allocator.match_prefix([1, 2, 3, 4, 9], salt_digest("three")) == []


def test_no_salt_leads_into_the_middle_of_another_prefix() -> None:
    tokens = (1, 2, 3)
    assert salt_digest(array("q", tokens).tobytes().decode()) != chain_digest(UNSALTED, tokens)


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    held = computed(allocator, [1, 2, 3, 4])
    assert allocator.match_prefix([1, 2, 3, 4]) == held[:1]
    assert allocator.match_prefix([1, 2, 3, 4, 5]) == held[:2]
    assert allocator.match_prefix([1, 2]) == []
    assert allocator.match_prefix([]) == []


def test_equal_tokens_behind_another_prefix_are_not_found() -> None:
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    computed(allocator, [1, 2, 3, 4, 5])
    assert allocator.match_prefix([3, 4, 3, 4, 5]) == []
    assert len(allocator.match_prefix([1, 2, 5, 6, 3, 4, 0])) == 1


def test_nothing_is_cached_when_prefix_caching_is_off() -> None:
    allocator = BlockAllocator(8, 2, prefix_caching=False)
    held = computed(allocator, [1, 2, 3, 4, 5])
    assert allocator.match_prefix([1, 2, 3, 4, 5]) == []
    allocator.release(held)
    allocator.check_integrity([])


def test_the_tail_is_evicted_before_the_head_and_the_oldest_first() -> None:
    allocator = BlockAllocator(6, 1, prefix_caching=True)
    old, new = computed(allocator, [1, 2, 3]), computed(allocator, [7, 8, 9])
    allocator.release(old)
    allocator.release(new)
    assert allocator.allocate(1) == [old[2]]
    assert allocator.match_prefix([1, 2, 3, 0]) == old[:2]
    allocator.release(old[:2])  # used again, so now the other one is the oldest
    assert allocator.allocate(4) == [new[2], new[1], new[0], old[1]]
    assert allocator.match_prefix([1, 2, 3, 0]) == old[:1]


def test_free_blocks_are_used_before_cached_ones() -> None:
    allocator = BlockAllocator(4, 1, prefix_caching=True)
    allocator.release(computed(allocator, [1, 2]))
    allocator.allocate(2)
    assert len(allocator.match_prefix([1, 2, 3])) == 2


def test_a_block_that_someone_holds_is_never_evicted() -> None:
    allocator = BlockAllocator(4, 1, prefix_caching=True)
    first = computed(allocator, [1, 2])
    second = allocator.match_prefix([1, 2, 3])
    allocator.release(first)
    taken = allocator.allocate(2)
    assert not set(taken) & set(second)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)
    allocator.check_integrity([second, taken])


def test_of_two_blocks_with_the_same_content_the_older_is_offered_and_the_other_stays_private() -> None:
    allocator = BlockAllocator(6, 1, prefix_caching=True)
    first, second = allocator.allocate(2), allocator.allocate(2)
    for blocks in (first, second):
        allocator.register(blocks[0], None, [5])
        allocator.register(blocks[1], blocks[0], [6])
    assert allocator.match_prefix([5, 6, 7]) == first
    allocator.release(second)
    allocator.check_integrity([first, first])
    assert not set(allocator.allocate(4)) & set(first)
    assert allocator.match_prefix([5, 6, 7]) == first


def test_only_an_unregistered_block_of_one_holder_is_private() -> None:
    allocator = BlockAllocator(4, 1, prefix_caching=True)
    (block,) = allocator.allocate(1)
    assert allocator.is_private(block)
    allocator.register(block, None, [5])
    assert not allocator.is_private(block)


def test_blocks_shared_with_others_do_not_count_as_freed() -> None:
    allocator = BlockAllocator(6, 1, prefix_caching=True)
    first = computed(allocator, [1, 2, 3])
    second = computed(allocator, [1, 2, 4])
    assert allocator.num_freed_by([first]) == 1
    assert allocator.num_freed_by([first, second]) == 4


def test_digests_are_the_same_in_every_process() -> None:
    code = "from dflash_engine.blocks import chain_digest; print(chain_digest(b'p', [1, -1, 2**40]).hex())"
    seeded = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert seeded[0] == seeded[1] == f"{chain_digest(b'p', [1, -1, 2**40]).hex()}\n".encode()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], r"block \d with 1 references is in 0 tables"),
        ([[0, 1], [0]], r"block 0 with 1 references is in 2 tables"),
        ([[0, 0, 1]], "holds a block twice"),
        ([[0, 1, 9]], "unknown block"),
    ],
)
def test_integrity_names_the_block_whose_holders_are_wrong(tables: list[list[int]], message: str) -> None:
    allocator = BlockAllocator(2, 1, prefix_caching=True)
    allocator.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        allocator.check_integrity(tables)


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_books_and_finds_only_true_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    allocator = BlockAllocator(rng.randint(4, 12), rng.randint(1, 3), prefix_caching=True)
    size = allocator.block_size
    content: dict[int, list[int]] = {}
    tables: list[list[int]] = []
    hits = 0
    for _ in range(300):
        if tables and rng.random() < 0.5:
            allocator.release(tables.pop(rng.randrange(len(tables))))
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 4 * size))]
            found = allocator.match_prefix(tokens)
            hits += len(found)
            for index, block in enumerate(found):
                assert content[block] == tokens[: (index + 1) * size]
            allocator.release(found)
            if allocator.blocks_for(len(tokens)) <= allocator.num_free:
                table = computed(allocator, tokens)
                content |= {block: tokens[: (i + 1) * size] for i, block in enumerate(table)}
                tables.append(table)
        allocator.check_integrity(tables)
    assert hits > 0
