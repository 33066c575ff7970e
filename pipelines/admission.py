"""Who may go into an engine, and what became of those who went: the one memory of a run outside its actors.

A Ray actor of its own beside the driver (`open_admission`), so that it outlives the engines. Attempts that
ended with a death are kept in the output too and survive everything else; the rest is known again from the
parts when this actor itself is restarted.

    look -> (the engine is loaded) -> admit -> trying -> end
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from pipelines.attempts import ATTEMPTS_PREFIX, Attempts, Rows, attempts_from_bytes
from pipelines.errors import BudgetReached, JobError
from pipelines.totals import Totals
from pipelines.write import Part, PartWriter

# More deaths than that, and not one row answered in the whole run: it is the engine, not the rows.
HOPELESS_DEATHS = 30


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing is admitted any more."""

    message: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Start:
    """An actor's process that loads its engine."""

    actor: str
    node: str
    pid: int
    log: str
    """The file that its stderr goes to; empty where there is none."""


@dataclass(frozen=True, slots=True)
class FailedStarts:
    """The starts of an actor's engine that failed since the last one that did not."""

    count: int = 0
    last: Start | None = None
    """A process that died of it; one that failed with an exception has said so itself."""
    refusal: Refusal | None = None
    """Why no engine is needed any more."""


@dataclass(slots=True)
class _Flight:
    """A part that is in an engine."""

    rows: int
    tried: Rows | None = None
    reason: str = ""


@dataclass(slots=True)
class _ActorStarts:
    failed: int = 0
    loading: Start | None = None


@dataclass(slots=True)
class _Spending:
    """Money and rows of the parts that are written, each part counted once."""

    usd: Decimal = Decimal(0)
    rows: int = 0
    parts: set[str] = field(default_factory=set)

    def add(self, name: str, totals: Totals) -> None:
        if name not in self.parts:
            self.parts.add(name)
            self.usd += totals.cost_usd
            self.rows += totals.rows

    def expected_usd(self, rows: int) -> Decimal:
        return self.usd / self.rows * rows if self.rows else Decimal(0)


class Admission:
    """What the actors of a run ask and tell; its methods are the messages."""

    def __init__(self, writer: PartWriter, budget_usd: Decimal | None) -> None:
        self._store = writer.store
        self._budget_usd = budget_usd
        self._spending = _Spending()
        if budget_usd is not None:
            for part in writer.parts():
                self._spending.add(part.name, writer.read_totals(part))
        self._flights: dict[str, _Flight] = {}
        self._attempts = {
            key.removeprefix(ATTEMPTS_PREFIX).removesuffix(".json"): attempts_from_bytes(self._store.get(key))
            for key in self._store.keys(ATTEMPTS_PREFIX)
        }
        self._starts: dict[str, _ActorStarts] = {}
        self._deaths = 0
        self._answered = False
        self._refusal: Refusal | None = None
        self._changed = asyncio.Condition()

    async def look(self, part: Part) -> Attempts:
        """What is known of a part that an actor was given. Given again while in flight, its actor died."""
        flight = self._flights.pop(part.name, None)
        if flight is not None:
            self._deaths += 1
            reason = flight.reason or "its process ended without a word"
            known = self._attempts.get(part.name, Attempts()).after_death(flight.tried, reason)
            self._attempts[part.name] = known
            await asyncio.to_thread(self._store.put, _key(part), known.as_bytes())
            if self._deaths >= HOPELESS_DEATHS and not self._answered:
                message = f"the engine died under {self._deaths} parts and no row was answered: {reason}"
                await self.refuse(message, JobError.exit_code)
            await self._tell()
        return self._attempts.get(part.name, Attempts())

    async def admit(self, part: Part, rows: int) -> Refusal | None:
        """Let a part into an engine, as soon as the budget allows; or say why it never will."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._refusal or self._decided(rows))
            if self._refusal is None and self._is_spent():
                assert self._budget_usd is not None
                self._refusal = Refusal(
                    f"budget_usd = {self._budget_usd:f} is reached, ${self._spending.usd:.6f} are spent: "
                    "what is written stays, and the same command with a higher budget_usd goes on",
                    BudgetReached.exit_code,
                )
            if self._refusal is None:
                self._flights[part.name] = _Flight(rows)
            return self._refusal

    async def trying(self, part: Part, rows: Rows) -> None:
        """These rows of a part are alone in their engine now."""
        self._flights[part.name].tried = rows

    async def dying(self, parts: Sequence[Part], reason: str) -> None:
        """An actor that knows why ends its process now."""
        for part in parts:
            if part.name in self._flights:
                self._flights[part.name].reason = reason

    async def give_back(self, part: Part) -> None:
        """An actor that ends on purpose leaves a part to others: that is no death."""
        self._flights.pop(part.name, None)
        await self._tell()

    async def end(self, part: Part, totals: Totals) -> None:
        """A part is written."""
        self._flights.pop(part.name, None)
        self._answered |= totals.rows_ok > 0
        self._spending.add(part.name, totals)
        if self._attempts.pop(part.name, None) is not None:
            await asyncio.to_thread(self._store.delete, _key(part))
        await self._tell()

    async def starting(self, start: Start) -> FailedStarts:
        """An actor is about to load its engine. Said twice without a word between, its process died of it."""
        known = self._starts.setdefault(start.actor, _ActorStarts())
        died, known.loading = known.loading, start
        known.failed += died is not None
        return FailedStarts(known.failed, died, self._refusal)

    async def start_failed(self, actor: str) -> int:
        """Loading ended with an exception; how many starts in a row have failed."""
        known = self._starts[actor]
        known.failed += 1
        known.loading = None
        return known.failed

    async def started(self, actor: str) -> None:
        """An engine is loaded."""
        self._starts.pop(actor, None)

    async def refuse(self, message: str, exit_code: int) -> None:
        """Admit nothing more, for a reason that ends the job."""
        self._refusal = self._refusal or Refusal(message, exit_code)
        await self._tell()

    def _is_spent(self) -> bool:
        return self._budget_usd is not None and self._spending.usd >= self._budget_usd

    def _decided(self, rows: int) -> bool:
        """False while it hangs on what the parts in flight will have cost."""
        if self._budget_usd is None or not self._flights:
            return True
        in_flight = sum(flight.rows for flight in self._flights.values())
        return self._spending.usd + self._spending.expected_usd(in_flight + rows) < self._budget_usd

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _key(part: Part) -> str:
    return f"{ATTEMPTS_PREFIX}{part.name}.json"
