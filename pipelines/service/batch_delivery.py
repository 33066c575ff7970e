"""The files of a batch that ends: its answers in one, its errors in the other, line by line."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from pipelines.service.batch import Batch, RequestCounts
from pipelines.service.batch_lines import numbered
from pipelines.service.batch_output import BatchOutput, expired_line
from pipelines.service.batch_store import BatchKey
from pipelines.service.file_store import FileStore, FileWriter, NewFile

PURPOSE = "batch_output"


@dataclass(frozen=True, slots=True)
class Delivery:
    """The files that were written; None for one that would be empty."""

    output_file_id: str | None
    error_file_id: str | None
    counts: RequestCounts


def deliver(key: BatchKey, batch: Batch, output: BatchOutput, files: FileStore) -> Delivery:
    """Write what is done of a batch whose ending is decided. Doing it again writes the same files again."""
    assert batch.ending is not None
    answers = _LateFile(files, key, batch, batch.ending.output_file_id, "output")
    errors = _LateFile(files, key, batch, batch.ending.error_file_id, "error")
    done: set[str] = set()
    num_failed = 0
    for line in output.lines():
        (answers if line.ok else errors).write(line.data)
        done.add(line.custom_id)
        num_failed += not line.ok
    if batch.ending.outcome == "expired":
        _write_expired(key, batch, files, done, errors)
    counts = RequestCounts(
        total=batch.request_counts.total, completed=len(done) - num_failed, failed=num_failed
    )
    return Delivery(answers.finish(), errors.finish(), counts)


def _write_expired(key: BatchKey, batch: Batch, files: FileStore, done: set[str], errors: _LateFile) -> None:
    """A line for every request that was not done; a file that is deleted by now has none to name."""
    source = files.find(key.owner, batch.input_file_id)
    if source is None or not batch.request_counts.total:
        return
    for _, raw in numbered(files.lines(key.owner, source)):
        custom_id = orjson.loads(raw)["custom_id"]
        if custom_id not in done:
            errors.write(expired_line(batch.id, custom_id))


class _LateFile:
    """A file that is begun with its first line."""

    def __init__(self, files: FileStore, key: BatchKey, batch: Batch, file_id: str, what: str) -> None:
        self._files = files
        self._new = NewFile(owner=key.owner, id=file_id, filename=f"{batch.id}_{what}.jsonl")
        self._expires_after_s = batch.output_expires_after_s
        self._writer: FileWriter | None = None

    def write(self, line: bytes) -> None:
        if self._writer is None:
            self._writer = self._files.write(self._new)
        self._writer.write(line)

    def finish(self) -> str | None:
        """The id of the file, where there is one."""
        if self._writer is None:
            return None
        return self._writer.finish(PURPOSE, self._expires_after_s).id
