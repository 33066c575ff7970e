"""A batch as it stands in the store: OpenAI's batch object, and how it is going to end."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Outcome = Literal["failed", "completed", "expired", "cancelled"]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
CANCELLABLE = frozenset({"validating", "in_progress"})


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestCounts(_Value):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(_Value):
    """Why a batch failed; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Ending(_Value):
    """Decided before the files are written, so that whoever goes on after a crash ends it the same way."""

    outcome: Outcome
    output_file_id: str
    """The ids that its files get, should there be anything to write."""
    error_file_id: str


class Batch(_Value):
    """Times are seconds since 1970. A field without value is null to clients."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    status: Status = "validating"
    model: str | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[BatchError, ...] = ()
    request_counts: RequestCounts = RequestCounts()
    usage: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    ending: Ending | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def at(self, status: Status, now_s: float, **changes: Any) -> Batch:
        """The batch with another status, its time, and further changes."""
        return self.model_copy(update={"status": status, f"{status}_at": int(now_s), **changes})

    def as_json(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        values = self.model_dump(exclude={"errors", "ending", "output_expires_after_s"})
        errors = [error.model_dump() for error in self.errors]
        values["errors"] = {"object": "list", "data": errors} if errors else None
        return {"object": "batch", **values}
