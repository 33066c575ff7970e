"""Usage records of a service: JSON lines under date=YYYY-MM-DD/, one object a flush, never rewritten."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import defaultdict
from dataclasses import asdict
from datetime import UTC, datetime

import orjson

from pipelines.errors import JobError
from pipelines.service.usage_record import UsageRecord
from pipelines.storage import Store

logger = logging.getLogger(__name__)


class UsageLedger:
    """Keeps records in memory for at most `flush_s`, then in the store; `close` puts the rest.

    Call it with a record, from any thread. A store that is away costs nothing: the records wait.
    """

    def __init__(self, store: Store, model: str, flush_s: float) -> None:
        self._store = store
        self._model = model
        self._flush_s = flush_s
        self._lines: defaultdict[str, list[bytes]] = defaultdict(list)
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._flush_for_ever, name="usage-ledger", daemon=True)
        self._thread.start()

    def __call__(self, record: UsageRecord) -> None:
        now = datetime.now(UTC)
        line = {
            "at": now.isoformat(timespec="milliseconds"),
            "model": self._model,
            "owner": record.owner,
            "request_id": record.request_id,
            "finished": record.finished,
            **asdict(record.usage),
        }
        with self._lock:
            self._lines[now.date().isoformat()].append(orjson.dumps(line) + b"\n")

    def flush(self) -> None:
        """Put what is there now. Raises `JobError` where the store is away; nothing is lost then."""
        with self._flushing:
            with self._lock:
                days, self._lines = self._lines, defaultdict(list)
            for day, lines in list(days.items()):
                try:
                    self._store.put(f"date={day}/usage-{uuid.uuid4().hex}.jsonl", b"".join(lines))
                except JobError:
                    with self._lock:
                        for later, kept in days.items():
                            self._lines[later][:0] = kept
                    raise
                del days[day]

    def close(self) -> None:
        """Ends its thread and puts the rest. Raises `JobError` where that cannot be."""
        self._closing.set()
        self._thread.join()
        self.flush()

    def _flush_for_ever(self) -> None:
        while not self._closing.wait(self._flush_s):
            try:
                self.flush()
            except JobError as error:
                logger.warning("usage records wait for the ledger: %s", error)
