"""The one seam to files and object stores: list, open, get, and puts that appear whole or not at all.

Keys are paths under a store's root with `/` between parts. Errors of the system are translated here and
say which object they concern.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from pipelines.errors import JobError, JobRefused, NotFound

# Below this size a file's digest is its etag: it survives copying, which `ray job submit` does to the
# working directory. Above it, reading everything only to compare would cost more than it saves.
DIGEST_LIMIT_BYTES = 4 << 20
READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object; `etag` changes whenever the content does."""

    key: str
    size_bytes: int
    etag: str


class Store(Protocol):
    """A root and the objects under it. Methods raise `NotFound` or `JobError` that names the object."""

    @property
    def uri(self) -> str: ...
    def keys(self, prefix: str = "") -> Iterator[str]:
        """Keys that start with `prefix`, in order; hidden ones are left out."""
        ...

    def info(self, key: str) -> ObjectInfo: ...
    def exists(self, key: str) -> bool: ...
    def open(self, key: str) -> BinaryIO: ...
    def get(self, key: str) -> bytes: ...
    def put(self, key: str, data: bytes) -> None:
        """Write or replace an object in one atomic act."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; False where it did."""
        ...


class LocalStore:
    """A folder of the local file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def uri(self) -> str:
        return str(self._root)

    def keys(self, prefix: str = "") -> Iterator[str]:
        folder = self._root / prefix.rpartition("/")[0]
        found = []
        for path in folder.rglob("*"):
            key = path.relative_to(self._root).as_posix()
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if key.startswith(prefix) and not hidden and path.is_file():
                found.append(key)
        yield from sorted(found)

    def info(self, key: str) -> ObjectInfo:
        with self._translated("read", key):
            stat = (self._root / key).stat()
            if stat.st_size > DIGEST_LIMIT_BYTES:
                return ObjectInfo(key, stat.st_size, f"mtime-{stat.st_mtime_ns}")
            return ObjectInfo(key, stat.st_size, blake2b(self.get(key), digest_size=16).hexdigest())

    def exists(self, key: str) -> bool:
        return (self._root / key).is_file()

    def open(self, key: str) -> BinaryIO:
        with self._translated("read", key):
            return (self._root / key).open("rb", buffering=READ_BUFFER_BYTES)

    def get(self, key: str) -> bytes:
        with self._translated("read", key):
            return (self._root / key).read_bytes()

    def put(self, key: str, data: bytes) -> None:
        with self._translated("write", key), self._staged(key, data) as staged:
            os.replace(staged, self._root / key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._translated("write", key), self._staged(key, data) as staged:
            try:
                os.link(staged, self._root / key)
            except FileExistsError:
                return False
            return True

    @contextlib.contextmanager
    def _staged(self, key: str, data: bytes) -> Iterator[Path]:
        """The data in a hidden file beside its target, on disk; gone afterwards."""
        target = self._root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with staged.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _translated(self, act: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{self._root / key} does not exist") from error
        except OSError as error:
            kind = JobRefused if isinstance(error, PermissionError | NotADirectoryError) else JobError
            raise kind(f"cannot {act} {self._root / key}: {error.strerror or error}") from error


def local_path(uri: str) -> Path:
    """The absolute path of a `file://` URI or a plain path. Raises `JobRefused` for other schemes."""
    if "://" not in uri:
        return Path(uri).expanduser().absolute()
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise JobRefused(f"{uri}: scheme {parts.scheme}:// is not supported; give a path or file://")
    return Path(unquote(parts.path))


def open_store(uri: str) -> Store:
    """The store whose root is `uri`. Raises `JobRefused` for a scheme that is not known."""
    return LocalStore(local_path(uri))
