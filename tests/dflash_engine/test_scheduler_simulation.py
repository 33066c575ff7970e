"""The scheduler under a fake target, in pools so small that blocks run out all the time.

The fake target says what the digest of the whole text before a position makes it say, so equal texts
go on equally. Each pool maps (block, offset) to the digest of the text up to the position whose KV
stands there: what a row relies on can be compared with what it should be.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest

from dflash_engine.plan import RowCommit, RowPlan, StepPlan
from dflash_engine.request import Priority, SamplingParams
from dflash_engine.scheduler import Scheduler

VOCABULARY = 3
Pool = dict[tuple[int, int], bytes]


def extend(digest: bytes, token: int) -> bytes:
    return blake2b(digest + bytes([token]), digest_size=16).digest()


@dataclass
class Text:
    """One sequence: what it is to become, and how much of it is committed."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: Priority
    arrival: int
    answer_length: int
    tokens: list[int] = field(default_factory=list)
    """Prompt and whole answer, and more of it than will be asked for."""
    digests: list[bytes] = field(default_factory=list)
    """Digest of the text up to and including each position."""
    num_known: int = 0
    steps_without_row: int = 0

    def __post_init__(self) -> None:
        self.num_known = len(self.prompt)
        digest = b""
        for position in range(len(self.prompt) + self.max_tokens + 1):
            prompted = position < len(self.prompt)
            self.tokens.append(self.prompt[position] if prompted else digest[0] % VOCABULARY)
            digest = extend(digest, self.tokens[-1])
            self.digests.append(digest)


class World:
    """A scheduler of random small sizes, random requests, and the two pools."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.block_size = rng.randint(1, 5)
        self.block_length = rng.randint(1, 6)
        self.max_model_len = rng.randint(6, 40)
        self.max_num_seqs = rng.randint(1, 8)
        self.max_step_tokens = rng.choice([1, 3, 10, 20, 60])
        longest = -(-(self.max_model_len + self.block_length) // self.block_size)
        self.num_blocks = longest + rng.randint(0, longest // 2)
        self.prefix_caching = rng.random() < 0.8
        self.scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_step_tokens=self.max_step_tokens,
            max_model_len=self.max_model_len,
            block_length=self.block_length,
            prefix_caching=self.prefix_caching,
        )
        self.sampling = SamplingParams()
        self.stems = [[rng.randrange(VOCABULARY) for _ in range(self.max_model_len)] for _ in range(2)]
        self.target: Pool = {}
        self.draft: Pool = {}
        self.texts: dict[int, Text] = {}
        self.seen: Counter[str] = Counter()

    def run(self, num_requests: int) -> None:
        added = 0
        while added < num_requests or self.texts:
            while added < num_requests and (not self.texts or self.rng.random() < 0.5):
                self.add(added)
                added += 1
            if self.texts and self.rng.random() < 0.03:
                self.abort(self.rng.choice(list(self.texts)))
            plan = self.scheduler.plan()
            assert (plan is None) == (not self.texts)
            if plan is not None:
                self.step(plan)
            self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (stats.waiting, stats.running, stats.free_blocks) == (0, 0, self.num_blocks)
        assert self.scheduler.plan() is None
        self.seen["preempted"] = stats.preemptions

    def add(self, seq_id: int) -> None:
        rng = self.rng
        length = rng.randint(1, rng.randint(1, self.max_model_len - 1))
        own = rng.randint(0, length)
        prompt = rng.choice(self.stems)[: length - own] + [rng.randrange(VOCABULARY) for _ in range(own)]
        longest = self.max_model_len - length
        max_tokens = rng.choice([longest, rng.randint(1, longest)])
        answer_length = rng.randint(1, max_tokens) if rng.random() < 0.5 else max_tokens
        priority = rng.choice([Priority.ONLINE, Priority.BATCH, Priority.BATCH])
        self.texts[seq_id] = Text(tuple(prompt), max_tokens, priority, seq_id, answer_length)
        self.scheduler.add(seq_id, tuple(prompt), max_tokens, self.sampling, seq_id, priority)

    def abort(self, seq_id: int) -> None:
        self.scheduler.abort(seq_id)
        del self.texts[seq_id]

    def step(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert len({row.seq_id for row in rows}) == len(rows) >= 1
        assert sum(len(row.tokens) + row.num_draft for row in rows) <= self.max_step_tokens
        assert self.scheduler.stats().running <= self.max_num_seqs
        for row in rows:
            self.check_row(row)
        self.check_writes(rows)
        self.check_progress(rows)
        commits = [self.execute(row) for row in rows]
        for commit in self.rng.sample(commits, len(commits)):
            if commit.finished:
                del self.texts[commit.seq_id]
        self.scheduler.commit(commits)

    def check_row(self, row: RowPlan) -> None:
        text = self.texts[row.seq_id]
        end = row.start + len(row.tokens)
        assert list(row.tokens) == text.tokens[row.start : end] and row.tokens
        assert end <= text.num_known and row.sample == (end == text.num_known)
        assert row.prompt == text.prompt
        assert list(row.output) == text.tokens[len(text.prompt) : text.num_known]
        assert len(set(row.block_table)) == len(row.block_table)
        assert (row.seed, row.sampling) == (row.seq_id, self.sampling)
        if row.num_draft:
            assert row.sample and len(row.tokens) == 1
            assert row.num_draft <= min(self.block_length, text.max_tokens - len(row.output)) - 1
            assert row.start + self.block_length <= self.max_model_len
        assert self.end_of_writes(row) <= len(row.block_table) * self.block_size
        for position in range(row.start):
            slot = self.slot(row, position)
            assert self.target[slot] == text.digests[position], f"target KV at {position}"
            assert self.draft[slot] == text.digests[position], f"draft KV at {position}"
        cached = self.scheduler.cached_tokens(row.seq_id)
        assert cached % self.block_size == 0 and cached < len(text.prompt)
        self.seen["cached"] += cached > 0
        self.seen["drafts"] += row.num_draft > 0
        self.seen["chunks"] += not row.sample

    def check_writes(self, rows: tuple[RowPlan, ...]) -> None:
        holders = Counter(block for row in rows for block in row.block_table)
        for row in rows:
            for position in range(row.start, self.end_of_writes(row)):
                assert holders[self.slot(row, position)[0]] == 1
        self.seen["shared"] += max(holders.values()) > 1

    def check_progress(self, rows: tuple[RowPlan, ...]) -> None:
        """The first in rank is in every step, unless its class takes turns over a tiny budget."""
        first = min(self.texts, key=lambda seq_id: (self.texts[seq_id].priority, self.texts[seq_id].arrival))
        for row in rows:
            self.texts[row.seq_id].steps_without_row = 0
        if first not in {row.seq_id for row in rows}:
            self.texts[first].steps_without_row += 1
        assert self.texts[first].steps_without_row < self.max_num_seqs

    def execute(self, row: RowPlan) -> RowCommit:
        """Draft, verify and stop, with everything that a real runner writes to the pools."""
        text = self.texts[row.seq_id]
        end = row.start + len(row.tokens)
        if row.num_draft:
            for position in range(row.start, row.start + self.block_length):
                self.draft[self.slot(row, position)] = b"draft block"
        accepted = self.rng.randint(0, row.num_draft)
        for position in range(row.start, end + row.num_draft):
            right = position < end + accepted
            self.target[self.slot(row, position)] = text.digests[position] if right else b"rejected"
            if right:
                self.draft[self.slot(row, position)] = text.digests[position]
        if not row.sample:
            return RowCommit(row.seq_id, (), finished=self.rng.random() < 0.02)
        left = text.answer_length - len(row.output)
        kept = tuple(text.tokens[end : end + min(accepted + 1, left)])
        assert kept
        text.num_known += len(kept)
        return RowCommit(row.seq_id, kept, finished=len(kept) == left)

    def end_of_writes(self, row: RowPlan) -> int:
        return row.start + (self.block_length if row.num_draft else len(row.tokens))

    def slot(self, row: RowPlan, position: int) -> tuple[int, int]:
        return row.block_table[position // self.block_size], position % self.block_size


@pytest.mark.parametrize("seed", range(150))
def test_every_sequence_gets_all_its_tokens_and_relies_only_on_its_own_content(seed: int) -> None:
    World(seed).run(num_requests=25)


def test_the_simulation_reaches_what_it_is_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        world = World(seed)
        world.run(num_requests=25)
        seen += world.seen
    assert min(seen[what] for what in ("preempted", "cached", "drafts", "chunks", "shared")) > 100, seen
