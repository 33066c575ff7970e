"""What leaves an actor for each shard: small, whatever the shard's size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from pipelines.totals import Totals, totals_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A shard that is written, or the sentence that ends the job."""

    shard_id: str
    input_bytes: int = 0
    totals: Totals = field(default_factory=Totals)
    first_error: str | None = None
    """Why one of the rows failed, where one did."""
    failure: str | None = None
    exit_code: int = 0

    def as_record(self) -> dict[str, Any]:
        """The receipt as one row of a dataset."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "totals"}
        values["totals"] = self.totals.as_json()
        return {"receipt": orjson.dumps(values).decode()}


def receipt_from_record(record: dict[str, Any]) -> Receipt:
    """The receipt of `as_record`."""
    values = orjson.loads(record["receipt"])
    return Receipt(**{**values, "totals": totals_from_json(values["totals"])})
