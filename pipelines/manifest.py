"""The last object of a job: what its parts hold, summed from the parts themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from pipelines.attempts import ATTEMPTS_PREFIX
from pipelines.config import BatchConfig
from pipelines.cost import PriceTable
from pipelines.errors import JobError, NotFound
from pipelines.job import MANIFEST_KEY, read_fingerprint
from pipelines.redo import REPAIRS_PREFIX
from pipelines.report import Summary
from pipelines.storage import Store
from pipelines.totals import Totals, totals_from_json
from pipelines.write import Part, PartWriter

VERSION = 1
# Parts are read side by side: on object stores the time of a read is waiting.
READERS = 8
# Hashes of custom_ids held at once: 128 MB. More ids are counted in several passes over the parts.
MAX_HASHES = 16_000_000


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest as it stands in the output."""

    summary: Summary
    keys: frozenset[str]
    """The parts that count."""
    etag: str

    def holds(self, writer: PartWriter) -> bool:
        """True where the latest part of every shard counts."""
        return self.keys == {writer.part_key(part) for part in writer.parts()}

    def outdated(self, writer: PartWriter) -> bool:
        """True where parts that count are the latest, and older ones are still there."""
        latest = {part.shard_id: part for part in writer.parts()}
        older = (part for part in writer.generations() if part != latest[part.shard_id])
        return any(writer.part_key(latest[part.shard_id]) in self.keys for part in older)


def write_manifest(
    writer: PartWriter, config: BatchConfig, prices: PriceTable, elapsed_s: float, replaced: str | None = None
) -> Summary:
    """Sum up the latest parts and put the manifest; the summary of the job.

    A manifest that is there stays, unless it is the one whose etag is `replaced`. Raises `JobError` where
    another driver was faster.
    """
    parts = writer.parts()
    with ThreadPoolExecutor(READERS) as pool:
        sums = list(pool.map(writer.read_totals, parts))
    totals = sum(sums, Totals())
    manifest = {
        "version": VERSION,
        "output": writer.store.uri,
        "model": config.engine.model,
        "fingerprint": read_fingerprint(writer.store),
        "totals": totals.as_json(),
        "duplicate_custom_ids": count_duplicates(writer, parts, totals.rows),
        "elapsed_s": round(elapsed_s, 3),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "tags": config.tags,
        "prices": {
            name: {"usd_per_hour": str(price.usd_per_hour), "date": price.date, "source": price.source}
            for name, price in prices.prices.items()
        },
        "parts": [
            {"key": writer.part_key(part), "rows_ok": counted.rows_ok, "rows_error": counted.rows_error}
            for part, counted in zip(parts, sums, strict=True)
        ],
    }
    data = orjson.dumps(manifest, option=orjson.OPT_INDENT_2)
    if replaced is None:
        writer.store.put_if_absent(MANIFEST_KEY, data)
    elif not writer.store.put_if_match(MANIFEST_KEY, data, replaced):
        raise JobError(f"{MANIFEST_KEY} of output {writer.store.uri} was changed by another driver")
    return _summary(manifest)


def clean_up(writer: PartWriter) -> None:
    """Remove what counts no more once the manifest is written: older generations, and notes of attempts.

    Whoever reads `data/*` without the manifest then finds every row once, too.
    """
    latest = set(writer.parts())
    for part in list(writer.generations()):
        if part not in latest:
            writer.store.delete(writer.part_key(part))
            writer.store.delete(part.errors_key)
    for prefix in (ATTEMPTS_PREFIX, REPAIRS_PREFIX):
        for key in list(writer.store.keys(prefix)):
            writer.store.delete(key)


def read_manifest(store: Store) -> Manifest | None:
    """The manifest of a job that is complete; None where it is not."""
    try:
        data, etag = store.get_with_etag(MANIFEST_KEY)
    except NotFound:
        return None
    values = orjson.loads(data)
    return Manifest(_summary(values), frozenset(part["key"] for part in values["parts"]), etag)


def count_duplicates(
    writer: PartWriter, parts: Iterable[Part], rows: int, max_hashes: int = MAX_HASHES
) -> int:
    """Rows whose custom_id some other row had before.

    Counted by 64-bit hashes in bounded memory: one pass over the parts for each `max_hashes` rows.
    """
    parts = list(parts)
    passes = -(-rows // max_hashes) or 1
    duplicates = 0
    for number in range(passes):
        hashes = np.fromiter(_hashes(writer, parts, number, passes), dtype=np.uint64)
        duplicates += len(hashes) - len(np.unique(hashes))
    return duplicates


def _hashes(writer: PartWriter, parts: list[Part], number: int, passes: int) -> Iterator[int]:
    for part in parts:
        for custom_id in writer.custom_ids(part):
            value = int.from_bytes(blake2b(custom_id.encode(), digest_size=8).digest())
            if value % passes == number:
                yield value


def _summary(manifest: dict[str, Any]) -> Summary:
    return Summary(
        output=manifest["output"],
        model=manifest["model"],
        totals=totals_from_json(manifest["totals"]),
        elapsed_s=manifest["elapsed_s"],
        parts=len(manifest["parts"]),
        duplicate_custom_ids=manifest["duplicate_custom_ids"],
    )
