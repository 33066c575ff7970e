"""A runner that other ranks follow, for operations that choose on the host."""

from __future__ import annotations

from dflash_engine.pipeline import Executor
from dflash_engine.plan import StepOutput, StepPlan
from dflash_engine.shard import Followers


class LeadingRunner:
    """Executes what its followers execute too. Raises `EngineDead` where one of them has ended."""

    rounds_ahead = 0

    def __init__(self, runner: Executor, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers

    def execute(self, plan: StepPlan) -> StepOutput:
        self._followers.tell(plan)
        output = self._runner.execute(plan)
        self._followers.check()
        return output
