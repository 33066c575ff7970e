"""What the memory of a run allows: money, deaths, and what it knows again after its own death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from pipelines.admission import HOPELESS_DEATHS, Admission, Start
from pipelines.attempts import Attempts
from pipelines.errors import BudgetReached, JobError
from pipelines.storage import LocalStore
from pipelines.totals import Totals
from pipelines.write import Part, PartWriter
from tests.pipelines.helpers import output_rows
from tests.pipelines.test_generate import generated, shards_of, spec

ROW = Totals(rows_ok=1, cost_usd=Decimal(1))


@pytest.fixture
def writer(tmp_path: Path) -> PartWriter:
    return PartWriter(LocalStore(tmp_path / "out"), "parquet", {})


def played(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))


def part(number: int) -> Part:
    return Part(f"00000-{number:06d}")


def test_what_is_in_flight_is_waited_for_before_the_budget_is_called_spent(writer: PartWriter):
    async def story() -> None:
        admission = Admission(writer, Decimal(10))
        assert await admission.admit(part(0), 4) is None
        await admission.end(part(0), Totals(rows_ok=4, cost_usd=Decimal(4)))
        # 4 spent and 4 expected: a third part of 4 would be too much, as far as one can tell.
        assert await admission.admit(part(1), 4) is None
        third = asyncio.create_task(admission.admit(part(2), 4))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not third.done()
        # It was cheaper than expected, and the third goes in although it may be too dear: it is alone.
        await admission.end(part(1), Totals(rows_ok=4, cost_usd=Decimal(3)))
        assert await third is None
        fourth = asyncio.create_task(admission.admit(part(3), 4))
        await admission.end(part(2), Totals(rows_ok=4, cost_usd=Decimal(3)))
        refusal = await fourth
        assert refusal is not None and refusal.exit_code == BudgetReached.exit_code == 3
        assert refusal.message == (
            "budget_usd = 10 is reached, $10.000000 are spent: what is written stays, and the same command "
            "with a higher budget_usd goes on"
        )

    played(story)


def test_a_part_whose_actor_died_is_not_waited_for(writer: PartWriter):
    async def story() -> None:
        admission = Admission(writer, Decimal(5))
        await admission.end(part(0), Totals(rows_ok=4, cost_usd=Decimal(4)))
        assert await admission.admit(part(1), 4) is None
        waiting = asyncio.create_task(admission.admit(part(2), 4))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert (await admission.look(part(1))).deaths == 1
        assert await waiting is None

    played(story)


def test_the_budget_counts_what_earlier_runs_have_written_and_a_higher_one_goes_on(tmp_path: Path):
    output = tmp_path / "out"
    shards = shards_of(tmp_path, [{"prompt": f"question {number}"} for number in range(40)], size=5)
    writer = spec(output).writer

    def run(budget_usd: Decimal | None) -> tuple[list[str | None], Decimal]:
        admission = Admission(writer, budget_usd)
        # The first ones teach what a row costs.
        receipts = generated(spec(output, admission=admission), shards[:1])
        receipts += generated(spec(output, admission=admission), shards[1:])
        return [receipt.failure for receipt in receipts], sum(row["cost_usd"] for row in output_rows(output))

    price = Decimal("0.00003")
    failures, spent = run(price)
    refused = [failure for failure in failures if failure]
    assert 0 < len(refused) == len(shards) - len(writer.parts())
    # At most by one shard too much.
    assert price <= spent < price * 2
    again, same = run(price)
    assert ([failure for failure in again if failure], same) == (refused, spent)
    failures, spent = run(price * 1000)
    assert not any(failures)
    assert len(output_rows(output)) == len({row["row_id"] for row in output_rows(output)}) == 40


def test_attempts_are_known_again_after_the_death_of_the_memory_itself(writer: PartWriter):
    async def story() -> None:
        admission = Admission(writer, None)
        assert await admission.look(part(0)) == Attempts()
        await admission.admit(part(0), 9)
        await admission.trying(part(0), (3, 4))
        await admission.dying([part(0), part(1)], "EngineDead: a step failed")
        known = await admission.look(part(0))
        assert (known.deaths, known.suspects, known.reason) == (1, (3, 4), "EngineDead: a step failed")
        again = Admission(writer, None)
        assert await again.look(part(0)) == known
        await again.end(part(0), ROW)
        assert await Admission(writer, None).look(part(0)) == Attempts()

    played(story)


def test_a_part_is_paid_for_once(writer: PartWriter):
    async def story() -> None:
        admission = Admission(writer, Decimal(2))
        for _ in range(3):
            await admission.end(part(0), ROW)
        assert await admission.admit(part(1), 1) is None

    played(story)


def test_an_engine_that_dies_of_everything_ends_the_job(writer: PartWriter):
    async def story(answered: bool) -> bool:
        admission = Admission(writer, None)
        if answered:
            await admission.end(part(999), ROW)
        for number in range(HOPELESS_DEATHS):
            assert await admission.admit(part(number), 1) is None
            await admission.dying([part(number)], "no kernel image")
            await admission.look(part(number))
        refusal = await admission.admit(part(0), 1)
        if refusal is not None:
            assert refusal.exit_code == JobError.exit_code
            assert refusal.message.endswith("and no row was answered: no kernel image")
        return refusal is not None

    assert asyncio.run(story(answered=False))
    assert not asyncio.run(story(answered=True))


def test_starts_are_counted_for_each_actor_until_one_succeeds(writer: PartWriter):
    async def story() -> None:
        admission = Admission(writer, None)
        first, second = Start("a", "n", 1, "log"), Start("a", "n", 2, "")
        assert (await admission.starting(first)).count == 0
        found = await admission.starting(second)
        assert (found.count, found.last) == (1, first)
        assert (await admission.starting(Start("b", "n", 3, ""))).count == 0
        assert await admission.start_failed("a") == 2
        assert (await admission.starting(second)).last is None
        await admission.started("a")
        assert (await admission.starting(second)).count == 0

    played(story)
