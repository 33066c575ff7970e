"""What is known of a part whose engine died under it, and how the row that does it is found.

1. In company: the part was in the engine with others when it died. Nobody knows whose fault it was.
2. Alone: it is done again with nothing else in the engine. A death is now its own.
3. Split: the rows that were in the engine go in again in a few small groups, one after the other. A group
   that dies is split again, down to single rows.
4. A row that killed the engine on its own `crashes` times gets an error row; the others are done without it.

An actor may also die for reasons of its machine. That costs a part nothing but some detours: no row is
blamed for one death.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import orjson

ATTEMPTS_PREFIX = "_attempts/"
# Of 256 rows, single ones are reached in two deaths; and each of the groups still fills an engine well.
GROUPS = 16
# Some six rows of one part are found until then; what is left is given up as it is.
MAX_DEATHS = 24
CRASH_CODE = "engine_crash"

Rows = tuple[int, ...]
"""Numbers of rows within a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """The attempts at one part that ended with the death of their actor."""

    deaths: int = 0
    suspects: Rows = ()
    """Rows that were in the engine, and nothing else, when it died last."""
    kills: Mapping[int, int] = field(default_factory=dict)
    """How often a row killed the engine on its own."""
    reason: str = ""
    """What is known of the last death."""

    def after_death(self, tried: Rows | None, reason: str) -> Attempts:
        """What is known after one more; `tried` are the rows that were alone in the engine, if they were."""
        died = replace(self, deaths=self.deaths + 1, reason=reason)
        if tried is None:
            return died
        if len(tried) > 1:
            return replace(died, suspects=tried)
        (row,) = tried
        return replace(died, suspects=tried, kills={**self.kills, row: self.kills.get(row, 0) + 1})

    def given_up(self, rows: Sequence[int], crashes: int) -> Rows:
        """Those of the rows that are not tried any more."""
        if self.deaths >= MAX_DEATHS:
            return tuple(rows)
        return tuple(row for row in rows if self.kills.get(row, 0) >= crashes)

    def groups(self, rows: Sequence[int], crashes: int) -> list[Rows]:
        """The other rows in the groups in which they go into the engine, suspects first."""
        left = set(rows).difference(self.given_up(rows, crashes))
        suspects = [row for row in self.suspects if row in left]
        size = -(-len(suspects) // GROUPS) or 1
        groups = [tuple(suspects[start : start + size]) for start in range(0, len(suspects), size)]
        rest = tuple(row for row in rows if row in left.difference(suspects))
        return [*groups, rest] if rest else groups

    def as_bytes(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_NON_STR_KEYS)


def attempts_from_bytes(data: bytes) -> Attempts:
    """The attempts of `as_bytes`."""
    values: dict[str, Any] = orjson.loads(data)
    kills = {int(row): count for row, count in values["kills"].items()}
    return Attempts(**{**values, "suspects": tuple(values["suspects"]), "kills": kills})
