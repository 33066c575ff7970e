"""Rounds on their way through a runner: launched, in flight, collected in order.

With `rounds_ahead` = 1 the host works on one round while the device computes the next:

    host      plan 1  launch 1  plan 2  launch 2  collect 1, commit 1  plan 3  launch 3  collect 2, ...
    device            [ ----- 1 ----- ]  [ ----- 2 ----- ]  [ ----- 3 ----- ]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from dflash_engine.plan import StepOutput, StepPlan


class Executor(Protocol):
    """A runner that has the result of a plan before it takes the next."""

    @property
    def rounds_ahead(self) -> int:
        """Rounds that may be in flight when the next one is launched."""
        ...

    def execute(self, plan: StepPlan) -> StepOutput: ...


@runtime_checkable
class Launcher(Executor, Protocol):
    """A runner that computes rounds in the order in which they are launched, while the host goes on."""

    def launch(self, plan: StepPlan) -> Any:
        """Returns at once with a ticket for `collect`."""
        ...

    def collect(self, ticket: Any) -> StepOutput:
        """Waits until the round is done. Each ticket once, the oldest first."""
        ...


class Pipeline:
    """Gives plans to a runner and their results back, oldest first."""

    def __init__(self, runner: Executor | Launcher) -> None:
        self._runner = runner
        self._launcher = runner if runner.rounds_ahead and isinstance(runner, Launcher) else None
        assert (self._launcher is None) == (runner.rounds_ahead == 0), (
            "a runner ahead needs launch and collect"
        )
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def rounds(self, plan: StepPlan | None) -> Iterator[tuple[StepPlan, StepOutput]]:
        """Takes a plan, if there is one, and gives the rounds to be committed now, which may be none.

        With no plan it waits for the oldest round in flight. To be used up before the next call.
        """
        if self._launcher is None or (plan is not None and plan.on_host):
            yield from self.drain()
            if plan is not None:
                yield plan, self._runner.execute(plan)
            return
        if plan is not None:
            self._in_flight.append((plan, self._launcher.launch(plan)))
        if self._in_flight and (plan is None or len(self._in_flight) > self._runner.rounds_ahead):
            yield self._collect(self._launcher)

    def drain(self) -> Iterator[tuple[StepPlan, StepOutput]]:
        """Waits for all rounds in flight."""
        while self._in_flight:
            assert self._launcher is not None
            yield self._collect(self._launcher)

    def _collect(self, launcher: Launcher) -> tuple[StepPlan, StepOutput]:
        plan, ticket = self._in_flight.popleft()
        return plan, launcher.collect(ticket)
