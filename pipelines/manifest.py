"""The last object of a job: what its parts hold, summed from the parts themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from pipelines.config import BatchConfig
from pipelines.cost import PriceTable
from pipelines.job import MANIFEST_KEY, read_fingerprint
from pipelines.report import Summary
from pipelines.storage import Store
from pipelines.totals import Totals, totals_from_json
from pipelines.write import PartWriter

VERSION = 1
# Parts are read side by side: on object stores the time of a read is waiting.
READERS = 8
# Hashes of custom_ids held at once: 128 MB. More ids are counted in several passes over the parts.
MAX_HASHES = 16_000_000


def write_manifest(writer: PartWriter, config: BatchConfig, prices: PriceTable, elapsed_s: float) -> Summary:
    """Sum up the parts and put the manifest; the summary of the job. A manifest that is there stays."""
    shards = sorted(writer.written_shards())
    with ThreadPoolExecutor(READERS) as pool:
        parts = list(zip(shards, pool.map(writer.read_totals, shards), strict=True))
    totals = sum((part for _, part in parts), Totals())
    manifest = {
        "version": VERSION,
        "output": writer.store.uri,
        "model": config.engine.model,
        "fingerprint": read_fingerprint(writer.store),
        "totals": totals.as_json(),
        "duplicate_custom_ids": count_duplicates(writer, shards, totals.rows),
        "elapsed_s": round(elapsed_s, 3),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "tags": config.tags,
        "prices": {
            name: {"usd_per_hour": str(price.usd_per_hour), "date": price.date, "source": price.source}
            for name, price in prices.prices.items()
        },
        "parts": [
            {"key": writer.part_key(shard), "rows_ok": part.rows_ok, "rows_error": part.rows_error}
            for shard, part in parts
        ],
    }
    writer.store.put_if_absent(MANIFEST_KEY, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
    return _summary(manifest)


def read_summary(store: Store) -> Summary | None:
    """The summary of a job that is complete; None where it is not."""
    if not store.exists(MANIFEST_KEY):
        return None
    return _summary(orjson.loads(store.get(MANIFEST_KEY)))


def count_duplicates(
    writer: PartWriter, shards: Iterable[str], rows: int, max_hashes: int = MAX_HASHES
) -> int:
    """Rows whose custom_id some other row had before.

    Counted by 64-bit hashes in bounded memory: one pass over the parts for each `max_hashes` rows.
    """
    shards = list(shards)
    passes = -(-rows // max_hashes) or 1
    duplicates = 0
    for number in range(passes):
        hashes = np.fromiter(_hashes(writer, shards, number, passes), dtype=np.uint64)
        duplicates += len(hashes) - len(np.unique(hashes))
    return duplicates


def _hashes(writer: PartWriter, shards: list[str], number: int, passes: int) -> Iterator[int]:
    for shard in shards:
        for custom_id in writer.custom_ids(shard):
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
