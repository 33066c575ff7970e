"""JSON objects of owners, one object of the store each, replaced only by compare and swap."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson

from pipelines.errors import NotFound
from pipelines.service.owner_folder import OwnerFolder
from pipelines.storage import Store

# In object stores reading is waiting.
READERS = 16
_TIME_DIGITS, _RANDOM_BYTES = 12, 16
_HEX = re.compile(f"[0-9a-f]{{{_TIME_DIGITS + 2 * _RANDOM_BYTES}}}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageAsked:
    """Which part of a list a client wants: those behind `after`, the latest made first by default."""

    limit: int
    after: str | None = None
    ascending: bool = False


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: list[T]
    has_more: bool


class ObjectTable(Generic[T]):
    """Objects `<kind>/<owner>/<id>.json`, read by `decode`.

    Ids begin with the time in milliseconds, so that a listing is in the order of their making, and have 128
    random bits behind it. What is not an id of this table is not there, whatever path it spells.
    """

    def __init__(self, store: Store, kind: str, id_prefix: str, decode: Callable[[bytes], T]) -> None:
        self._store = store
        self._kind = kind
        self._id_prefix = id_prefix
        self._decode = decode

    def new_id(self, now_s: float) -> str:
        random = secrets.token_hex(_RANDOM_BYTES)
        return f"{self._id_prefix}{int(now_s * 1000):0{_TIME_DIGITS}x}{random}"

    def find(self, owner: OwnerFolder, item_id: str) -> tuple[T, str] | None:
        """The object and its etag; None where this owner has none of that id."""
        if not self._is_id(item_id):
            return None
        try:
            data, etag = self._store.get_with_etag(self._key(owner, item_id))
        except NotFound:
            return None
        return self._decode(data), etag

    def put(self, owner: OwnerFolder, item_id: str, value: Mapping[str, Any]) -> None:
        self._store.put(self._key(owner, item_id), orjson.dumps(value))

    def insert(self, owner: OwnerFolder, item_id: str, value: Mapping[str, Any]) -> None:
        """Write a new object."""
        new = self._store.put_if_absent(self._key(owner, item_id), orjson.dumps(value))
        assert new, f"{item_id} is there already"

    def replace(self, owner: OwnerFolder, item_id: str, value: Mapping[str, Any], etag: str) -> bool:
        """Write over the object with `etag`; False where it has changed since."""
        return self._store.put_if_match(self._key(owner, item_id), orjson.dumps(value), etag)

    def delete(self, owner: OwnerFolder, item_id: str) -> None:
        self._store.delete(self._key(owner, item_id))

    def page(self, owner: OwnerFolder, asked: PageAsked, wanted: Callable[[T], bool]) -> Page[T]:
        """The wanted objects behind `after`, whether that one is still there or not."""
        ids = self._ids(owner)
        if not asked.ascending:
            ids.reverse()
        if asked.after is not None:
            after = asked.after
            ids = [item for item in ids if (item > after if asked.ascending else item < after)]
        found: list[T] = []
        for item in self._read(owner, ids):
            if wanted(item):
                found.append(item)
            if len(found) > asked.limit:
                break
        return Page(found[: asked.limit], len(found) > asked.limit)

    def _read(self, owner: OwnerFolder, ids: list[str]) -> Iterator[T]:
        with ThreadPoolExecutor(READERS) as pool:
            for start in range(0, len(ids), READERS):
                for found in pool.map(lambda item: self.find(owner, item), ids[start : start + READERS]):
                    # One may go between the listing and the reading.
                    if found is not None:
                        yield found[0]

    def _ids(self, owner: OwnerFolder) -> list[str]:
        folder = f"{self._kind}/{owner}/"
        names = (key.removeprefix(folder).removesuffix(".json") for key in self._store.keys(folder))
        return sorted(name for name in names if self._is_id(name))

    def _is_id(self, name: str) -> bool:
        start = len(self._id_prefix)
        return name.startswith(self._id_prefix) and _HEX.fullmatch(name[start:]) is not None

    def _key(self, owner: OwnerFolder, item_id: str) -> str:
        assert self._is_id(item_id), item_id
        return f"{self._kind}/{owner}/{item_id}.json"
