"""Batches of owners in the store, changed by compare and swap only.

batches/<owner>/<id>.json   the state
open/<owner>/<id>           while it has not ended: what a restart has to look at
jobs/<owner>/<id>/          the output of its job
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipelines.service.batch import Batch
from pipelines.service.object_table import ObjectTable, Page, PageAsked
from pipelines.service.owner_folder import OwnerFolder
from pipelines.storage import Store


class BatchKey(NamedTuple):
    """Whose batch, and which."""

    owner: OwnerFolder
    id: str


class BatchStore:
    """The batches under a root. Methods block; they raise `JobError` where the store fails."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._table = ObjectTable(store, "batches", "batch_", Batch.model_validate_json)

    def new_key(self, owner: OwnerFolder) -> BatchKey:
        return BatchKey(owner, self._table.new_id(self._clock()))

    def create(self, key: BatchKey, batch: Batch) -> None:
        # First, for a batch without it would never be done; without the batch it means nothing.
        self._store.put(_open_key(key), b"")
        self._table.insert(key.owner, key.id, batch.model_dump(mode="json"))

    def find(self, key: BatchKey) -> Batch | None:
        """The batch, unless it is another owner's or there is none."""
        found = self._table.find(key.owner, key.id)
        return None if found is None else found[0]

    def page(self, owner: OwnerFolder, asked: PageAsked) -> Page[Batch]:
        return self._table.page(owner, asked, lambda batch: True)

    def update(self, key: BatchKey, change: Callable[[Batch], Batch]) -> Batch:
        """The batch after `change`, which is asked again where somebody else was faster.

        A batch that has ended is not changed any more.
        """
        while True:
            found = self._table.find(key.owner, key.id)
            assert found is not None, f"{key.id} is gone"
            batch, etag = found
            changed = batch if batch.ended else change(batch)
            if changed == batch or self._table.replace(
                key.owner, key.id, changed.model_dump(mode="json"), etag
            ):
                return changed

    def open_batches(self) -> list[BatchKey]:
        """Those that may not have ended, oldest first."""
        names = (key.split("/") for key in self._store.keys("open/"))
        keys = [BatchKey(OwnerFolder(owner), batch_id) for _, owner, batch_id in names]
        return sorted(keys, key=lambda key: key.id)

    def close(self, key: BatchKey) -> None:
        """Nothing is left to do for it."""
        self._store.delete(_open_key(key))

    def output_uri(self, key: BatchKey) -> str:
        """Where its job writes."""
        return f"{self._store.uri}/jobs/{key.owner}/{key.id}"


def _open_key(key: BatchKey) -> str:
    return f"open/{key.owner}/{key.id}"
