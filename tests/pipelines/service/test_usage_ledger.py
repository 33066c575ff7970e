"""Usage records on disk: by day, complete, and not lost where the disk is away for a while."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest

from dflash_engine.request import Usage
from pipelines.errors import JobError
from pipelines.service.usage_ledger import UsageLedger
from pipelines.service.usage_record import UsageRecord
from pipelines.storage import LocalStore

NEVER_S = 3600.0
LONG_S = 20.0


class Fails(LocalStore):
    """Puts that fail, as often as it was told."""

    failures = 0

    def put(self, key: str, data: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise JobError("no space left")
        super().put(key, data)


def record(number: int, owner: str = "search") -> UsageRecord:
    return UsageRecord(owner, f"request-{number}", Usage(7, 3, number), finished=number % 2 == 0)


def lines(folder: Path) -> list[dict[str, object]]:
    files = sorted(folder.glob("date=*/usage-*.jsonl"))
    return [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]


def test_each_record_is_one_line_under_its_day(tmp_path: Path):
    before = datetime.now(UTC)
    ledger = UsageLedger(LocalStore(tmp_path), "model-1", NEVER_S)
    ledger(record(4))
    ledger(record(5, "night"))
    ledger.close()
    found = lines(tmp_path)
    assert [(line["owner"], line["request_id"], line["finished"]) for line in found] == [
        ("search", "request-4", True),
        ("night", "request-5", False),
    ]
    assert [(line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) for line in found] == [
        (7, 3, 4),
        (7, 3, 5),
    ]
    assert {line["model"] for line in found} == {"model-1"}
    times = [datetime.fromisoformat(str(line["at"])) for line in found]
    assert all(before.timestamp() - 0.001 <= time.timestamp() for time in times)
    folders = {file.parent.name for file in tmp_path.glob("date=*/*")}
    assert folders == {f"date={time.date().isoformat()}" for time in times}


def test_records_wait_for_a_store_that_is_away_and_are_written_once_in_order(tmp_path: Path):
    store = Fails(tmp_path)
    ledger = UsageLedger(store, "m", NEVER_S)
    ledger(record(1))
    store.failures = 1
    with pytest.raises(JobError):
        ledger.flush()
    ledger(record(2))
    ledger.flush()
    ledger.flush()
    ledger.close()
    assert [line["request_id"] for line in lines(tmp_path)] == ["request-1", "request-2"]
    assert len(list(tmp_path.glob("date=*/*"))) == 1


def test_it_writes_by_itself(tmp_path: Path):
    written = threading.Event()

    class Tells(LocalStore):
        def put(self, key: str, data: bytes) -> None:
            super().put(key, data)
            written.set()

    ledger = UsageLedger(Tells(tmp_path), "m", 0.01)
    ledger(record(1))
    assert written.wait(LONG_S)
    ledger.close()
    assert len(lines(tmp_path)) == 1
