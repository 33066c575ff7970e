"""The one seam to files and object stores: list, open, get, and puts that appear whole or not at all.

Keys are paths under a store's root with `/` between parts. Errors of the system are translated in each
store and say which object they concern.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Protocol

from pipelines.local_store import LocalStore, local_path
from pipelines.object_info import ObjectInfo
from pipelines.storage_config import StorageConfig

__all__ = ["LocalStore", "ObjectInfo", "Store", "lies_under", "local_path", "open_store"]

# Read through pyarrow.
ARROW_SCHEMES = frozenset({"gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"})


class Store(Protocol):
    """A root and the objects under it. Methods raise `NotFound` or `JobError` that names the object."""

    @property
    def uri(self) -> str: ...
    def keys(self, prefix: str = "") -> Iterator[str]:
        """Keys that start with `prefix`, in order; hidden ones are left out."""
        ...

    def info(self, key: str) -> ObjectInfo: ...
    def exists(self, key: str) -> bool: ...
    def open(self, key: str) -> BinaryIO:
        """A seekable stream of one version of the object."""
        ...

    def get(self, key: str) -> bytes: ...
    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """The content and its etag in one read, for `put_if_match`."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write or replace an object in one atomic act."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; False where it did."""
        ...

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        """Replace an object only while it still is the one with `etag`; False otherwise.

        Excludes other conditional puts and `delete`. A plain `put` of the same key may come in between.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; no error where it is absent."""
        ...


def open_store(uri: str, settings: StorageConfig | None = None) -> Store:
    """The store whose root is `uri`: a path, file://, s3://, or for reading gs://, abfs:// or hdfs://.

    Nothing is asked of it yet. Raises `JobRefused` for a scheme that is not known.
    """
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme == "s3":
        # Imported where they are needed: neither is quick.
        from pipelines.s3_store import s3_store

        return s3_store(uri, settings or StorageConfig())
    if scheme in ARROW_SCHEMES:
        from pipelines.arrow_store import arrow_store

        return arrow_store(uri)
    return LocalStore(local_path(uri))


def lies_under(uri: str, folder: str) -> bool:
    """Whether an object or folder is `folder` itself or inside it; both are URIs or paths."""
    inner, outer = (_normal(each) for each in (uri, folder))
    return inner == outer or inner.startswith(f"{outer}/")


def _normal(uri: str) -> str:
    scheme, _, place = uri.partition("://")
    return str(local_path(uri)) if not place or scheme == "file" else uri.rstrip("/")
