"""A runner whose results come one round late, made of one that has no such thing."""

from __future__ import annotations

from dataclasses import replace

from dflash_engine.plan import RowPlan, StepOutput, StepPlan
from dflash_engine.runner import Runner


class LateRunner:
    """Computes a round when it is launched, like a device that is quick, and tells when it is asked.

    What a device knows of a sequence before the host does is kept by slot: its tokens.
    """

    rounds_ahead = 1

    def __init__(self, runner: Runner, busy_ns: int | None = None) -> None:
        self._runner = runner
        self._busy_ns = busy_ns
        self._known: dict[int, list[int]] = {}
        self._in_flight: list[tuple[int, StepOutput]] = []
        self._num_rounds = 0
        self.log: list[str] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        assert not self._in_flight, "a round is in flight"
        self._num_rounds += 1
        self.log.append(f"execute {self._num_rounds}")
        return self._run(plan)

    def launch(self, plan: StepPlan) -> int:
        assert not plan.on_host
        self._num_rounds += 1
        self.log.append(f"launch {self._num_rounds}")
        self._in_flight.append((self._num_rounds, self._run(plan)))
        assert len(self._in_flight) <= 2
        return self._num_rounds

    def collect(self, ticket: int) -> StepOutput:
        number, output = self._in_flight.pop(0)
        assert number == ticket
        self.log.append(f"collect {number}")
        return output

    def _run(self, plan: StepPlan) -> StepOutput:
        rows = tuple(self._resolved(row) for row in plan.rows)
        output = self._runner.execute(replace(plan, rows=rows))
        for row, out in zip(rows, output.rows, strict=True):
            self._known[row.slot] = [*row.prompt, *row.output, *out.tokens]
        return StepOutput(output.rows, self._busy_ns)

    def _resolved(self, row: RowPlan) -> RowPlan:
        """The row as it is planned where everything before it is known."""
        if not row.ahead:
            return row._replace(output=tuple(row.output))
        assert not row.tokens and row.sample
        known = self._known[row.slot]
        start = len(known) - 1
        assert row.start <= start
        output = tuple(known[len(row.prompt) :])
        assert list(row.output) == list(output[: len(row.output)])
        return row._replace(start=start, tokens=(known[-1],), output=output, ahead=False)
