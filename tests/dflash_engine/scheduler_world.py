"""A scheduler under a fake device, in pools so small that blocks run out all the time.

The fake target says what the digest of the whole text before a position makes it say, so equal texts
go on equally. Each pool maps (block, offset) to the digest of the text up to the position whose KV
stands there: what a row relies on can be compared with what it should be.

The device runs rounds in the order in which they are launched, and keeps by slot how far a sequence is.
What a round gives is seen when it is collected, which may be later.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from dflash_engine.batch_room import BatchShare
from dflash_engine.plan import RowCommit, RowPlan, StepPlan
from dflash_engine.request import Priority
from dflash_engine.scheduler import Scheduler
from dflash_engine.step_times import StepTimes
from tests.dflash_engine.fake_texts import ON_HOST, PLAIN, VOCABULARY, MoodyPolicy, Text


def steep(rng: random.Random) -> StepTimes:
    """Where a step becomes dearer at every few tokens."""
    sizes = sorted(rng.sample(range(1, 60), 20))
    table = {size: 1 + 0.05 * size for size in sizes}
    return StepTimes(table, table, table, host_s=1.0, host_row_s=rng.choice([0.0, 0.2]))


Pool = dict[tuple[int, int], bytes]


class Round(NamedTuple):
    """What the device has done and the host has not seen: a row, its first position, its tokens."""

    rows: list[tuple[RowPlan, int, tuple[int, ...]]]


class World:
    """A scheduler of random small sizes, random requests, the two pools, and rounds in flight."""

    def __init__(
        self,
        seed: int,
        rounds_ahead: int = 0,
        policy: bool = False,
        on_host: bool = False,
        online_first: bool = False,
        starving: bool = False,
    ) -> None:
        rng = self.rng = random.Random(seed)
        self.now_s = 0.0
        self.rounds_ahead = rounds_ahead
        self.block_size = rng.randint(1, 5)
        self.block_length = rng.randint(1, 6)
        self.max_model_len = rng.randint(6, 40)
        self.max_num_seqs = rng.randint(1, 8)
        self.max_step_tokens = rng.choice([1, 3, 10, 20, 60])
        overhang = self.block_length * (1 + rounds_ahead)
        longest = -(-(self.max_model_len + overhang) // self.block_size)
        self.num_blocks = longest + rng.randint(0, longest // 2)
        self.prefix_caching = rng.random() < 0.8
        self.policy = MoodyPolicy(random.Random(seed)) if policy else None
        self.scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_step_tokens=self.max_step_tokens,
            max_model_len=self.max_model_len,
            block_length=self.block_length,
            prefix_caching=self.prefix_caching,
            rounds_ahead=rounds_ahead,
            draft_policy=self.policy,
            share=BatchShare(steep(rng), rng.choice([1.0, 1.2, 2.0])) if online_first else None,
            batch_starvation_s=2.0 if starving else None,
            clock=self.clock,
        )
        self.starving = starving
        self.eagerness = rng.choice([0.6, 1.0])
        """How often the next round is planned where the last one could be waited for."""
        self.samplings = [PLAIN, PLAIN, ON_HOST] if on_host else [PLAIN]
        self.stems = [[rng.randrange(VOCABULARY) for _ in range(self.max_model_len)] for _ in range(2)]
        self.target: Pool = {}
        self.draft: Pool = {}
        self.lengths: dict[int, tuple[int, int]] = {}
        """By slot: whose it is, and the position of its anchor."""
        self.rounds: deque[Round] = deque()
        self.texts: dict[int, Text] = {}
        self.cached: dict[tuple[bytes, int], list[bytes]] = {}
        """What stood in each registered block when it was first seen."""
        self.seen: Counter[str] = Counter()

    def clock(self) -> float:
        """A second for each step that is planned, more or less."""
        self.now_s += self.rng.random() * 2
        return self.now_s

    def run(self, num_requests: int) -> None:
        added = 0
        while added < num_requests or self.texts or self.rounds:
            while added < num_requests and (not self.texts or self.rng.random() < 0.5):
                self.add(added)
                added += 1
            if self.texts and self.rng.random() < 0.03:
                self.abort(self.rng.choice(list(self.texts)))
            self.go_on()
            self.scheduler.check_integrity()
            self.check_cache()
        stats = self.scheduler.stats()
        assert (stats.waiting, stats.running, stats.free_blocks) == (0, 0, self.num_blocks)
        assert self.scheduler.plan() is None
        self.seen["preempted"] = stats.preemptions

    def go_on(self) -> None:
        """Plans and launches, or collects: whichever comes first."""
        full = len(self.rounds) > self.rounds_ahead
        plan = None
        if not full and (not self.rounds or self.rng.random() < self.eagerness):
            plan = self.scheduler.plan()
            assert plan is not None or self.rounds or not self.texts
            self.seen["held back"] += plan is None and bool(self.rounds)
        elif self.rounds:
            self.collect()
            return
        if plan is None:
            if self.rounds:
                self.collect()
            return
        if plan.on_host:
            while self.rounds:
                self.collect()
        self.launch(plan)
        if plan.on_host or not self.rounds_ahead:
            self.collect()

    def add(self, seq_id: int) -> None:
        rng = self.rng
        length = rng.randint(1, rng.randint(1, self.max_model_len - 1))
        own = rng.randint(0, length)
        prompt = rng.choice(self.stems)[: length - own] + [rng.randrange(VOCABULARY) for _ in range(own)]
        longest = self.max_model_len - length
        max_tokens = rng.choice([longest, rng.randint(1, longest)])
        answer_length = rng.randint(1, max_tokens) if rng.random() < 0.5 else max_tokens
        priority = rng.choice([Priority.ONLINE, Priority.BATCH, Priority.BATCH])
        overhang = self.block_length * (1 + self.rounds_ahead) + 1
        sampling = rng.choice(self.samplings)
        self.texts[seq_id] = Text(
            tuple(prompt), max_tokens, priority, seq_id, answer_length, overhang, sampling
        )
        self.scheduler.add(seq_id, tuple(prompt), max_tokens, sampling, seq_id, priority)

    def abort(self, seq_id: int) -> None:
        self.seen["aborted in flight"] += bool(self.texts[seq_id].in_flight)
        self.scheduler.abort(seq_id)
        del self.texts[seq_id]

    def launch(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert len({row.seq_id for row in rows}) == len({row.slot for row in rows}) == len(rows) >= 1
        assert sum(row.num_tokens + row.num_draft for row in rows) <= self.max_step_tokens
        assert self.scheduler.stats().running <= self.max_num_seqs
        self.check_progress(rows)
        done = []
        for row in rows:
            text = self.texts[row.seq_id]
            begin = self.begin(row)
            self.check_row(row, begin)
            self.check_writes(row, begin)
            if self.rounds_ahead:
                assert plan.on_host == (row.sampling is ON_HOST)
            done.append((row._replace(block_table=tuple(row.block_table)), begin))
            text.in_flight.append(row)
        self.rounds.append(Round([self.execute(row, begin, plan.write_context) for row, begin in done]))
        self.seen["on host"] += plan.on_host
        self.seen["without context"] += not plan.write_context

    def begin(self, row: RowPlan) -> int:
        """Where the row begins, as the device knows it."""
        assert 0 <= row.slot < self.max_num_seqs
        if not row.ahead:
            return row.start
        owner, length = self.lengths[row.slot]
        num_drafted = sum(earlier.num_draft for earlier in self.texts[row.seq_id].in_flight)
        assert owner == row.seq_id and row.start <= length <= row.start + num_drafted
        return length

    def check_row(self, row: RowPlan, begin: int) -> None:
        text = self.texts[row.seq_id]
        end = begin + row.num_tokens
        assert row.ahead == any(earlier.sample for earlier in text.in_flight)
        assert row.ahead == (not row.tokens) and not text.surely_ends
        if not row.ahead:
            assert list(row.tokens) == text.tokens[begin:end] and end <= text.num_known
            assert row.sample == (end == text.num_known and not row.rebuild)
        else:
            assert row.sample and not row.rebuild
        assert row.prompt == text.prompt
        assert list(row.output) == text.tokens[len(text.prompt) : text.num_known]
        assert len(set(row.block_table)) == len(row.block_table)
        assert (row.seed, row.sampling) == (row.seq_id, text.sampling)
        if row.num_draft:
            num_promised = sum(earlier.sample for earlier in text.in_flight)
            assert row.sample and row.num_tokens == 1
            assert (
                row.num_draft <= min(self.block_length, text.max_tokens - len(row.output) - num_promised) - 1
            )
            assert row.start + self.block_length <= self.max_model_len
        assert self.end_of_writes(row, begin) <= len(row.block_table) * self.block_size
        for position in range(begin):
            slot = self.slot(row, position)
            assert self.target[slot] == text.digests[position], f"target KV at {position}"
            if row.num_draft or self.policy is None:
                assert self.draft[slot] == text.digests[position], f"draft KV at {position}"
        cached = self.scheduler.cached_tokens(row.seq_id)
        assert cached % self.block_size == 0 and cached < len(text.prompt)
        self.seen["cached"] += cached > 0
        self.seen["drafts"] += row.num_draft > 0
        self.seen["chunks"] += not row.sample
        self.seen["ahead"] += row.ahead
        self.seen["rebuilt"] += row.rebuild

    def check_writes(self, row: RowPlan, begin: int) -> None:
        """What is written for the first time is nobody else's, and nobody can find it."""
        holders = Counter(block for seq in self.scheduler._residency.running for block in seq.blocks)
        registered = set(self.scheduler._residency._blocks._registered.values())
        for position in range(begin, self.end_of_writes(row, begin)):
            block, _ = self.slot(row, position)
            assert row.rebuild or (holders[block] == 1 and block not in registered)
        self.seen["shared"] += max(holders.values()) > 1

    def check_progress(self, rows: Sequence[RowPlan]) -> None:
        """The first in rank goes on, but for turns: over a tiny budget, and with the other kind of step."""
        going = {i: text for i, text in self.texts.items() if not text.surely_ends}
        first = min(going, key=lambda seq_id: (going[seq_id].priority, going[seq_id].arrival))
        for row in rows:
            self.texts[row.seq_id].steps_without_row = 0
        if self.starving:  # then batch is first now and then, and how long it waits is bounded by the clock
            self.seen["promoted"] += any(
                seq.promoted_at is not None for seq in self.scheduler._residency.running
            )
            self.seen["due"] += bool(self.scheduler._starvation.due & {row.seq_id for row in rows})
            return
        if first not in {row.seq_id for row in rows}:
            going[first].steps_without_row += 1
        turns = self.max_num_seqs if self.max_step_tokens < self.max_num_seqs else 1
        # Rounds in flight are waited for, and a policy that changes its mind stops a rebuild under way.
        waits = self.rounds_ahead + 2 * (self.policy is not None)
        assert going[first].steps_without_row < (turns + waits) * (2 if ON_HOST in self.samplings else 1)

    def check_cache(self) -> None:
        """A block that can be found is never written to, and has the draft's context if it says so."""
        blocks = self.scheduler._residency._blocks
        registered = blocks._registered.items()
        self.cached = {key: content for key, content in self.cached.items() if key in registered}
        for digest, block in registered:
            slots = [(block, offset) for offset in range(self.block_size)]
            content = [self.target[slot] for slot in slots]
            assert self.cached.setdefault((digest, block), content) == content
            if blocks._has_context[block]:
                assert [self.draft[slot] for slot in slots] == content

    def execute(self, row: RowPlan, begin: int, write_context: bool) -> tuple[RowPlan, int, tuple[int, ...]]:
        """Draft and verify, with everything that a real runner writes to the pools."""
        text = self.texts[row.seq_id]
        end = begin + row.num_tokens
        if row.num_draft:
            for position in range(begin, begin + self.block_length):
                self.draft[self.slot(row, position)] = b"draft block"
        accepted = self.rng.randint(0, row.num_draft)
        for position in range(begin, end + row.num_draft):
            right = position < end + accepted
            self.target[self.slot(row, position)] = text.digests[position] if right else b"rejected"
            if right and write_context:
                self.draft[self.slot(row, position)] = text.digests[position]
        if not row.rebuild:
            self.lengths[row.slot] = row.seq_id, end + accepted
        return row, end, tuple(text.tokens[end : end + accepted + 1]) if row.sample else ()

    def collect(self) -> None:
        commits = []
        for row, end, tokens in self.rounds.popleft().rows:
            text = self.texts.get(row.seq_id)
            if text is None:
                self.seen["thrown away"] += 1
                continue
            text.in_flight.pop(0)
            if not row.sample:
                commits.append(RowCommit(row.seq_id, (), finished=self.rng.random() < 0.02))
                continue
            assert end == text.num_known
            left = len(text.prompt) + text.answer_length - text.num_known
            kept = tokens[:left]
            assert kept
            text.num_known += len(kept)
            commits.append(RowCommit(row.seq_id, kept, finished=len(kept) == left))
        for commit in commits:
            if commit.finished:
                del self.texts[commit.seq_id]
        self.scheduler.commit(self.rng.sample(commits, len(commits)))

    def end_of_writes(self, row: RowPlan, begin: int) -> int:
        return begin + (self.block_length if row.num_draft else row.num_tokens)

    def slot(self, row: RowPlan, position: int) -> tuple[int, int]:
        return row.block_table[position // self.block_size], position % self.block_size
