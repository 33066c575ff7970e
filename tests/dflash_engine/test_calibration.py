"""Rounds that are measured are such as there can be, and what is measured comes out by size."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import pytest

from dflash_engine.calibration import LONG, SHORT, WAYS, Calibration, Limits
from dflash_engine.gpu_runner import RoundOutput
from dflash_engine.plan import StepPlan
from dflash_engine.round_layout import SIZES
from dflash_engine.round_timer import RoundTimes
from dflash_engine.slots import kind_of

BLOCK_SIZE, NUM_BLOCKS = 4, 30
US = 1000


@dataclass
class TimedRunner:
    """A round's draft takes 10 us for each row, its verify pass 100 us and 1 us for each token, its context
    2 us for each; now and then the device hiccups."""

    plans: list[StepPlan] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        return plan

    def collect(self, plan: StepPlan) -> RoundOutput:
        hiccup = 5000 * US if len(self.plans) % 3 == 1 else 0
        written = [num_tokens(plan) if plan.write_context else 0 for plan in self.plans[-2:-1]]
        times = RoundTimes(
            draft_ns=10 * US * sum(row.num_draft > 0 for row in plan.rows) + hiccup,
            verify_ns=100 * US + US * num_tokens(plan) + hiccup,
            context_before_ns=2 * US * sum(written),
        )
        return RoundOutput((), times.busy_ns, None, times)


def num_tokens(plan: StepPlan) -> int:
    return sum(row.num_tokens + row.num_draft for row in plan.rows)


def calibration(limits: Limits, num_draft: int) -> tuple[Calibration, TimedRunner]:
    runner = TimedRunner()
    num_blocks = -(-(limits.max_model_len + 2 * (num_draft + 1)) // BLOCK_SIZE)
    return Calibration(runner, limits, num_blocks, num_draft), runner


@pytest.mark.parametrize("num_draft", [0, 1, 7, 63])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 48, 256])
def test_every_round_could_be_one_of_a_scheduler(max_num_seqs: int, num_draft: int):
    for max_step_tokens, max_model_len in itertools.product([1, 2, 20, 512, 2048], [2, 64, 300, 5000]):
        limits = Limits(max_num_seqs, max_step_tokens, max_model_len)
        made, runner = calibration(limits, num_draft)
        made.warm_up()
        made.measure()
        for plan in runner.plans:
            assert 1 <= len(plan.rows) <= max_num_seqs and num_tokens(plan) <= max_step_tokens
            assert len({row.slot for row in plan.rows}) == len(plan.rows)
            assert all(0 <= row.slot < max_num_seqs for row in plan.rows)
            assert plan.write_context == (num_draft > 0)
            for row in plan.rows:
                assert not row.ahead and row.num_tokens >= 1 and row.num_draft <= num_draft
                # Tables of rotations and of blocks end there; a draft's block is written whole.
                drafted = 1 + num_draft if row.num_draft else 0
                end = row.start + max(row.num_tokens + row.num_draft, drafted)
                assert end <= max_model_len + 2 * (num_draft + 1)
                assert end <= len(row.block_table) * BLOCK_SIZE
                assert set(row.block_table) == {0}


def test_chunks_of_one_prompt_are_warmed_up_in_every_size_of_a_tile_near_and_far():
    made, runner = calibration(Limits(256, 100, 4000), num_draft=7)
    made.warm_up()
    alone = {(plan.rows[0].num_tokens, plan.rows[0].start) for plan in runner.plans if len(plan.rows) == 1}
    assert {(num, start) for num in (2, 4, 8, 16, 32, 64) for start in (SHORT, LONG)} <= alone
    assert max(num for num, _ in alone) <= 100


@dataclass
class Attending(TimedRunner):
    """Each token takes a nanosecond more for each position before it."""

    def collect(self, plan: StepPlan) -> RoundOutput:
        output = super().collect(plan)
        assert output.times is not None
        keys = sum(row.num_tokens * row.start for row in plan.rows)
        times = output.times._replace(verify_ns=output.times.verify_ns + keys)
        return RoundOutput((), times.busy_ns, None, times)


def test_keys_weigh_as_much_as_the_rest_of_a_token_behind_the_span():
    for length, expected in ((10_000, 1000.0), (600, 1000.0), (300, math.inf)):
        limits = Limits(4, 2048, length)
        num_blocks = -(-length // BLOCK_SIZE)
        span = Calibration(Attending(), limits, num_blocks, 0).attention_span()
        assert span == pytest.approx(expected, rel=0.01)
    made, _ = calibration(Limits(4, 2048, 10_000), 0)
    assert made.attention_span() == math.inf


def test_times_come_out_by_size_without_the_hiccups():
    made, _ = calibration(Limits(6, 100, 500), num_draft=7)
    times = made.measure()
    sizes = [size for size in SIZES if size < 100] + [100]
    measured = {kind: times.kinds[kind].measured_s for kind in times.kinds}
    assert measured["verify"] == pytest.approx({size: (100 + size) * 1e-6 for size in sizes})
    assert measured["context"] == pytest.approx({size: 2 * size * 1e-6 for size in sizes})
    assert measured["draft"] == pytest.approx({rows: 10 * rows * 1e-6 for rows in (1, 2, 4, 6)})


def test_without_a_draft_no_row_drafts():
    made, runner = calibration(Limits(8, 64, 100), num_draft=0)
    made.warm_up()
    made.measure()
    assert runner.plans and not any(row.num_draft for plan in runner.plans for row in plan.rows)


def test_every_way_to_choose_is_warmed_up_for_few_rows_and_for_many():
    made, runner = calibration(Limits(256, 512, 1000), num_draft=7)
    made.warm_up()
    seen = {(kind_of(plan.rows[0].sampling), len(plan.rows)) for plan in runner.plans}
    for sampling in WAYS:
        assert {(kind_of(sampling), num) for num in (1, 32, 64, 128)} <= seen
    sizes = {num_tokens(plan) for plan in runner.plans}
    assert sizes >= {size for size in SIZES if size <= 512}


def test_sequences_that_go_on_take_no_slot_again():
    """A table that is known is not written once more: with many long ones that took most of the start."""
    made, runner = calibration(Limits(256, 512, 1000), num_draft=7)
    made.warm_up()
    made.measure()
    assert len({id(row.block_table) for plan in runner.plans for row in plan.rows}) == len(WAYS)
