"""The choice of drafts, against exhaustive search and against rounds simulated with costs that are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

from dflash_engine.acceptance import Acceptance
from dflash_engine.draft_policy import CONTEXT_SPELL, DraftPolicy, Outcome
from dflash_engine.draft_search import Candidate
from dflash_engine.step_times import StepTimes

MOST = 7
BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096]
ROW_BUCKETS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


@dataclass(frozen=True)
class Costs:
    """Verification is flat up to some tokens, then a line; draft and context grow with what they handle."""

    base_s: float
    flat_tokens: int
    token_s: float
    draft_s: float
    draft_row_s: float
    context_s: float
    context_token_s: float

    def times(self, verify: float = 1.0, draft: float = 1.0, context: float = 1.0) -> StepTimes:
        """Start-up tables, off by these factors."""
        target = {b: verify * (self.base_s + max(0, b - self.flat_tokens) * self.token_s) for b in BUCKETS}
        drafts = {r: draft * (self.draft_s + max(0, r - 16) * self.draft_row_s) for r in ROW_BUCKETS}
        writes = {b: context * (self.context_s + b * self.context_token_s) for b in BUCKETS}
        return StepTimes(target, drafts, writes)


# About an embedded model of 135 M parameters and one of 8 B on an H200.
SMALL = Costs(4e-4, 64, 1.8e-6, 1e-4, 1.2e-6, 2e-5, 5e-8)
LARGE = Costs(4.4e-3, 128, 2.8e-5, 5e-4, 2e-5, 1e-4, 1e-6)


def best_fixed_rate(costs: Costs, rates: list[float]) -> float:
    """Tokens per second of the best of plain decoding and every fixed number of drafted tokens."""
    times, n = costs.times(), len(rates)
    best = n / times.verify(n)
    for k in range(1, MOST + 1):
        tokens = n + sum(rate**i for rate in rates for i in range(1, k + 1))
        best = max(best, tokens / (times.verify(n + n * k) + times.draft(n) + times.context(n + n * k)))
    return best


@dataclass
class Simulation:
    """Rounds of rows whose drafted tokens are accepted with rates[row], results known a round late.

    Each request lives for 60 rounds, then another of the same kind takes its row.
    """

    costs: Costs
    rates: list[float]
    policy: DraftPolicy
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    chosen: list[tuple[int, ...]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.true = self.costs.times()
        self.rng = np.random.default_rng(self.seed)
        self.ids = list(range(len(self.rates)))
        self.ages = self.rng.integers(60, size=len(self.ids)).tolist()
        self.missing = [0] * len(self.ids)
        self.late = None

    def run(self, num_rounds: int) -> float:
        """Tokens per second of these rounds."""
        self.tokens, self.seconds = 0, 0.0
        for _ in range(num_rounds):
            self.round()
        return self.tokens / self.seconds

    def round(self):
        rows = [Candidate(i, 0 if gap else MOST, gap) for i, gap in zip(self.ids, self.missing, strict=True)]
        choice = self.policy.choose(rows, 0)
        drafted = np.array(choice.num_draft)
        size, drafting = len(rows) + int(drafted.sum()), int((drafted > 0).sum())
        seconds = self.true.verify(size) + self.true.draft(drafting)
        seconds += self.true.context(size) if choice.write_context else 0
        seconds *= float(np.exp(self.rng.normal(0, 0.03)))
        right = self.rng.random((len(rows), MOST)) < np.array(self.rates)[:, None]
        accepted = np.minimum(right.cumprod(axis=1).sum(axis=1), drafted).tolist()
        self.tokens += len(rows) + sum(accepted)
        self.seconds += seconds
        self.chosen.append(choice.num_draft)
        self.reasons.append(choice.reason)
        if self.late:
            self.policy.observe_round(*self.late)
        outcomes = [Outcome(*row) for row in zip(self.ids, choice.num_draft, accepted, strict=True)]
        self.late = (outcomes, 0, choice.write_context, seconds)
        self.grow_old(accepted, choice.write_context)

    def grow_old(self, accepted: list[int], write_context: bool):
        for row in range(len(self.ids)):
            self.ages[row] += 1
            if not write_context:
                self.missing[row] += 1 + accepted[row]
            if self.ages[row] == 60:
                self.policy.forget(self.ids[row])
                self.ages[row], self.ids[row] = 0, self.ids[row] + len(self.ids)
                self.missing[row] = 0 if write_context else 100


def policy_for(times: StepTimes) -> DraftPolicy:
    return DraftPolicy(times, Acceptance(MOST), MOST + 1)


def rows_of(num_rows: int, most: int = MOST, missing: int = 0) -> list[Candidate]:
    return [Candidate(i, most, missing) for i in range(num_rows)]


# Fewer rows learn less in a round, so what learning costs is shared by more rounds.
ROUNDS = {1: 2000, 8: 1200, 32: 600, 128: 400, 512: 300}


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("num_rows", ROUNDS)
@pytest.mark.parametrize("costs", [SMALL, LARGE], ids=["small", "large"])
def test_no_load_and_no_text_is_lost_to_plain_decoding_or_to_a_fixed_number(costs, num_rows, rate):
    simulation = Simulation(costs, [rate] * num_rows, policy_for(costs.times()))
    assert simulation.run(ROUNDS[num_rows]) >= 0.98 * best_fixed_rate(costs, simulation.rates)


@pytest.mark.parametrize("rates", [(0.9, 0.1), (0.8, 0.4)])
@pytest.mark.parametrize("costs", [SMALL, LARGE], ids=["small", "large"])
def test_easy_and_hard_requests_together_are_faster_than_with_any_fixed_number(costs, rates):
    simulation = Simulation(costs, [*rates] * 16, policy_for(costs.times()))
    assert simulation.run(600) > 1.05 * best_fixed_rate(costs, simulation.rates)


WRONG = [(2, 1, 1), (0.5, 1, 1), (1, 2, 1), (1, 0.5, 1), (2, 2, 2), (0.5, 0.5, 0.5)]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("costs", "num_rows", "rate"), [(SMALL, 128, 0.9), (SMALL, 128, 0.5), (LARGE, 32, 0.9)]
)
def test_start_up_times_that_are_wrong_by_two_are_corrected(costs, num_rows, rate, wrong):
    simulation = Simulation(costs, [rate] * num_rows, policy_for(costs.times(*wrong)))
    simulation.run(150)
    assert simulation.run(300) >= 0.98 * best_fixed_rate(costs, simulation.rates)


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_close_to_the_best_of_all_choices(seed):
    rng = random.Random(seed)
    num_rows, most, other = rng.randint(1, 4), 3, rng.choice([0, 0, 5])
    sizes = sorted(rng.sample(range(1, 24), 6))
    verify = {size: 1e-3 + i * rng.choice([5e-5, 4e-4]) for i, size in enumerate(sizes)}
    draft_s = rng.choice([5e-5, 3e-4])
    times = StepTimes(verify, {r: draft_s * r for r in (1, 2, 4)}, {32: 5e-5})
    acceptance = Acceptance(most)
    for _ in range(10):
        taken = [min(most, int(rng.expovariate(0.4 + i))) for i in range(num_rows)]
        acceptance.observe_round(range(num_rows), [most] * num_rows, taken)
    chances = [acceptance.chances(i, most) for i in range(num_rows)]
    limits = [rng.randint(0, most) for _ in range(num_rows)]

    def rate(counts: tuple[int, ...]) -> float:
        tokens = num_rows + sum(sum(chances[i][:k]) for i, k in enumerate(counts))
        size = num_rows + sum(counts)
        seconds = times.verify(size + other)
        if any(counts):
            seconds += times.draft(sum(k > 0 for k in counts)) + times.context(size + other)
        return tokens / seconds

    best = max(rate(counts) for counts in product(*(range(limit + 1) for limit in limits)))
    policy = DraftPolicy(times, acceptance, most + 1)
    candidates = [Candidate(i, limit) for i, limit in enumerate(limits)]
    for _ in range(0 if not other else 300):  # prompts count with their mean share, learnt by then
        policy.choose(candidates, other)
    choice = next(c for _ in range(3) if (c := policy.choose(candidates, other)).reason != "trial")
    assert all(k <= limit for k, limit in zip(choice.num_draft, limits, strict=True))
    assert rate(choice.num_draft) >= 0.97 * best


def test_a_load_that_falls_is_answered_in_the_next_round():
    policy = policy_for(SMALL.times())
    for _ in range(30):
        policy.choose(rows_of(512), 0)
    choice = policy.choose(rows_of(4), 0)
    assert (choice.num_draft, choice.reason) == ((MOST,) * 4, "pays")


def test_the_same_calls_give_the_same_choices():
    runs = [Simulation(SMALL, [0.7, 0.3] * 20, policy_for(SMALL.times())) for _ in range(2)]
    assert runs[0].run(80) == runs[1].run(80)
    assert runs[0].chosen == runs[1].chosen


def test_trials_and_the_context_written_for_them_cost_about_one_per_cent():
    simulation = Simulation(SMALL, [0.5] * 256, policy_for(SMALL.times()))
    simulation.run(CONTEXT_SPELL + 20)
    assert simulation.run(800) >= 0.985 * best_fixed_rate(SMALL, simulation.rates)
    assert simulation.reasons.count("trial") > 0


def test_text_that_becomes_easy_is_noticed_though_drafting_was_given_up():
    simulation = Simulation(SMALL, [0.05] * 32, policy_for(SMALL.times()))
    simulation.run(500)
    assert not any(simulation.chosen[-1]) and simulation.missing[0] > 0
    simulation.rates = [0.9] * 32
    simulation.run(2500)
    assert simulation.run(300) >= 0.98 * best_fixed_rate(SMALL, simulation.rates)


def test_context_is_written_for_a_spell_without_drafts_and_then_no_more():
    policy = policy_for(SMALL.times())
    written = [policy.choose(rows_of(512), 0).write_context for _ in range(CONTEXT_SPELL + 10)]
    assert written == [True] * CONTEXT_SPELL + [False] * 10
    assert policy.choose(rows_of(2), 0).write_context


def test_rows_that_miss_their_context_do_not_draft_but_are_rebuilt_where_that_pays():
    policy = policy_for(SMALL.times())
    for _ in range(2 * CONTEXT_SPELL):
        policy.choose(rows_of(512), 0)
    rows = rows_of(4, most=0, missing=300)
    assert not policy.worth_rebuilding(rows[0], 1000)
    choice = policy.choose(rows, 0)
    assert (choice.num_draft, choice.write_context, choice.reason) == ((0,) * 4, True, "resume")
    assert policy.worth_rebuilding(rows[0], 1000)
    assert not policy.worth_rebuilding(rows[0], 2)
    assert not policy.worth_rebuilding(Candidate(0, 0, 1_000_000), 1000)


def test_a_row_whose_text_drafts_badly_is_not_rebuilt():
    policy = policy_for(LARGE.times())
    for _ in range(20):
        policy.observe_round([Outcome(0, 7, 0), *(Outcome(i, 7, 7) for i in range(1, 32))], 0, True)
    policy.choose(rows_of(32, most=0, missing=100), 0)
    assert policy.worth_rebuilding(Candidate(1, 0, 100), 1000)
    assert not policy.worth_rebuilding(Candidate(0, 0, 100), 1000)


def test_a_round_that_waits_for_the_host_drafts_for_nothing():
    """128 rows of middling text do not pay on their own, but do where the host takes longer anyway."""
    free = StepTimes({b: SMALL.times().verify(b) for b in BUCKETS}, {512: 3e-4}, {4096: 5e-5})
    bound = StepTimes({b: SMALL.times().verify(b) for b in BUCKETS}, {512: 3e-4}, {4096: 5e-5}, 0.0, 1e-5)
    assert not any(policy_for(free).choose(rows_of(256), 0).num_draft)
    assert any(policy_for(bound).choose(rows_of(256), 0).num_draft)


def test_a_long_prompt_in_a_round_does_not_make_drafts_look_cheap():
    """Seen alone, that round would commit more tokens a second with drafts, up to the next bucket."""
    policy = policy_for(SMALL.times())
    for _ in range(20):
        assert not any(policy.choose(rows_of(256), 0).num_draft)
    assert not any(policy.choose(rows_of(256), 2048 - 256).num_draft)


def test_rounds_without_decoding_rows_decide_nothing():
    policy = policy_for(SMALL.times())
    assert policy.choose([], 500).num_draft == () and policy.choose([], 500).write_context
    policy.observe_round([], 500, True, 0.001)
    assert policy.choose(rows_of(1), 0).num_draft == (MOST,)


def test_rows_without_room_for_a_draft_get_none():
    policy = policy_for(SMALL.times())
    assert policy.choose([Candidate(1, 0), Candidate(2, 3), Candidate(3, MOST)], 0).num_draft == (0, 3, MOST)
    assert policy.choose(rows_of(3, most=0), 0).num_draft == (0, 0, 0)


@pytest.mark.parametrize(("last_s", "count"), [(1.01e-3, MOST), (2e-3, 0)])
def test_beyond_the_largest_bucket_the_line_decides(last_s, count):
    times = StepTimes({8: 1e-3, 16: last_s}, {64: 1e-4}, {512: 1e-5})
    assert policy_for(times).choose(rows_of(40), 0).num_draft == (count,) * 40
