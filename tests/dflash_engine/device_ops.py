"""Rounds as a GPU runs them, on a CPU in little time: the compiled CPU kernels compute the models, and only
what makes a round of it (feed, choose, accept, block tables) runs in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dflash_engine import loading
from dflash_engine.device_round import DeviceRound
from dflash_engine.gpu_runner import GpuRunner, Ticket
from dflash_engine.plan import StepPlan
from kernels.cpu import CpuOps


class DeviceCpuOps(CpuOps):
    """Chooses without the host, as the engine asks of operations that compute rounds ahead."""

    name = "triton"


@contextmanager
def rounds_ahead() -> Iterator[list[StepPlan]]:
    """Engines that are built meanwhile have a `GpuRunner`; the list gets the plans that it launches."""
    launched: list[StepPlan] = []
    launch = GpuRunner.launch

    def spy(runner: GpuRunner, plan: StepPlan) -> Ticket:
        launched.append(plan)
        return launch(runner, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "choose_ops", lambda *_, **__: DeviceCpuOps(1))
        patch.setattr(GpuRunner, "launch", spy)
        yield launched


@contextmanager
def drafts_that_are_often_right(
    answers: dict[tuple[int, ...], tuple[int, ...]], rate: float = 0.75
) -> Iterator[list[int]]:
    """Drafts of a `GpuRunner` as a trained draft would make them; the draft model's own are replaced.

    `answers` has the right tokens by prompt, at least as many as are asked for. The list that is given gets
    the position in its answer from which each row is drafted.
    """
    noise = random.Random(0)
    made: list[int] = []
    launch, draft = GpuRunner.launch, DeviceRound.draft
    plans: list[StepPlan] = []

    def spy(runner: GpuRunner, plan: StepPlan) -> Ticket:
        plans.append(plan)
        return launch(runner, plan)

    def better(made_round: DeviceRound, num_rows: int, heated: bool) -> None:
        draft(made_round, num_rows, heated)
        drafting = [row for row in plans[-1].rows if row.num_draft] if plans else []
        for index, row in enumerate(drafting):
            if tuple(row.prompt) not in answers:
                continue  # a round that is measured when the engine starts
            length = int(made_round._slots.state.length[row.slot]) if row.ahead else row.start
            at = length + 1 - len(row.prompt)
            made.append(at)
            right = list(answers[tuple(row.prompt)][at:][: made_round._drafts.shape[1]])
            right += [0] * (made_round._drafts.shape[1] - len(right))
            guesses = [token if noise.random() < rate else noise.randrange(300) for token in right]
            made_round._drafts[index] = torch.tensor(guesses, dtype=torch.int32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuRunner, "launch", spy)
        patch.setattr(DeviceRound, "draft", better)
        yield made
