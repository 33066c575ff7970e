"""The object in which a driver says that it works on an output: its content, and how it is swapped."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import orjson

from pipelines.errors import JobError, JobRefused, NotFound
from pipelines.processes import ProcessMark
from pipelines.storage import Store

LEASE_KEY = "_lease.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """What the object holds. `renewals` makes every renewal another content, and so another etag."""

    owner: str
    """Another one for each run."""
    epoch: int
    """Counts the owners of an output."""
    duration_s: float
    renewals: int = 0
    released: bool = False
    host: str
    process: ProcessMark
    since_boot_s: float = 0.0
    """When it was renewed, on the clock of the owner's machine."""
    renewed_at: str = ""
    """For people."""

    def renewed(self, now_s: float) -> LeaseRecord:
        """The record of the next renewal."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return replace(self, renewals=self.renewals + 1, since_boot_s=now_s, renewed_at=now)

    def as_bytes(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)


Found = tuple[LeaseRecord, str]
"""A record as it stands in the store, with its etag."""


def read_lease(store: Store) -> Found | None:
    """The lease of an output; None where there never was one."""
    try:
        data, etag = store.get_with_etag(LEASE_KEY)
    except NotFound:
        return None
    values = orjson.loads(data)
    return LeaseRecord(**{**values, "process": ProcessMark(**values["process"])}), etag


def swap_lease(store: Store, record: LeaseRecord, etag: str | None) -> Found | None:
    """Put a record over the one with `etag`, or where there is none yet; what stands there afterwards.

    That is someone else's where they were faster, and an older one of the same owner where its put had
    succeeded and only the answer was lost. Raises `JobError` where the store says nothing clear.
    """
    problem: JobError | None = None
    try:
        if etag is None:
            store.put_if_absent(LEASE_KEY, record.as_bytes())
        else:
            store.put_if_match(LEASE_KEY, record.as_bytes(), etag)
    except JobRefused:
        raise
    except JobError as error:
        problem = error
    found = read_lease(store)
    if problem is not None and (found is None or found[0] != record):
        raise problem
    return found
