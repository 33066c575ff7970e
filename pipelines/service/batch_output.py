"""What a batch's job has written: how far it is, what it cost, and its lines as OpenAI's files have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from pipelines.lease_object import read_lease
from pipelines.manifest import read_manifest
from pipelines.storage import Store
from pipelines.totals import Totals
from pipelines.write import Part, PartWriter


@dataclass(frozen=True, slots=True)
class OutputLine:
    """One row's line; `ok` says which of the two files it belongs to."""

    custom_id: str
    ok: bool
    data: bytes


class BatchOutput:
    """The output folder of one batch's job. Methods block."""

    def __init__(self, store: Store, batch_id: str, model: str | None) -> None:
        self._store = store
        self._writer = PartWriter(store, "openai", {})
        self._batch_id = batch_id
        self._model = model
        self._counted: dict[Part, Totals] = {}

    def totals(self) -> Totals:
        """Of all rows that are written; parts that were counted before are not read again."""
        for part in self._writer.parts():
            if part not in self._counted:
                self._counted[part] = self._writer.read_totals(part)
        return sum(self._counted.values(), Totals())

    def is_complete(self) -> bool:
        return read_manifest(self._store) is not None

    def is_held(self) -> bool:
        """True where a job seems to be at work here."""
        found = read_lease(self._store)
        return found is not None and not found[0].released and not found[0].process.is_gone()

    def lines(self) -> Iterator[OutputLine]:
        """Every row that is written, part by part."""
        for part in self._writer.parts():
            for raw in self._store.get(self._writer.part_key(part)).split(b"\n"):
                if raw:
                    yield self._line(orjson.loads(raw))

    def delete_rows(self) -> None:
        """Remove the rows, which are in the batch's files; the manifest stays for the books."""
        for prefix in ("data/", "errors/"):
            for key in list(self._store.keys(prefix)):
                self._store.delete(key)

    def _line(self, line: dict[str, Any]) -> OutputLine:
        """Ids are made of row ids, which repeat from batch to batch; clients take them for unique."""
        key = blake2b(f"{self._batch_id}:{line.pop('row_id')}".encode(), digest_size=16).hexdigest()
        line["id"] = f"batch_req_{key}"
        response = line["response"]
        ok = response is not None and response["status_code"] == 200
        if response is not None:
            response["request_id"] = f"req_{key}"
        if ok:
            body = response["body"]
            body["id"] = f"{body['id'].partition('-')[0]}-{key}"
            body["model"] = self._model or body["model"]
        return OutputLine(line["custom_id"], ok, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def expired_line(batch_id: str, custom_id: str) -> bytes:
    """The error file's line of a request that was not done in time."""
    key = blake2b(f"{batch_id}:{custom_id}".encode(), digest_size=16).hexdigest()
    error = {
        "code": "batch_expired",
        "message": "this request was not done before the batch expired",
    }
    line = {"id": f"batch_req_{key}", "custom_id": custom_id, "response": None, "error": error}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def usage_json(totals: Totals) -> dict[str, Any]:
    """OpenAI's usage of a batch, with what it cost beside it."""
    return {
        "input_tokens": totals.prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_tokens},
        "output_tokens": totals.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        "gpu_seconds": totals.gpu_seconds,
        "cost_usd": float(totals.cost_usd),
    }
