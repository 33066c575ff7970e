"""A folder as a store: objects are staged in hidden files and appear by a rename or a link."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from pipelines.errors import JobError, JobRefused, NotFound
from pipelines.object_info import ObjectInfo

# Below this size a file's digest is its etag: it survives copying, which `ray job submit` does to the
# working directory. Above it, reading everything only to compare would cost more than it saves.
DIGEST_LIMIT_BYTES = 4 << 20
READ_BUFFER_BYTES = 1 << 20
LOCK_NAME = ".lock"


class LocalStore:
    """A folder of the local file system.

    `put_if_match` and `delete` exclude each other by `flock` on a hidden file of the object's folder, which
    the system gives up when its holder dies. On NFS that needs a lock service that all clients share; where
    there is none (mounted with `nolock`), machines do not see each other's locks.
    """

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
                return ObjectInfo(key, stat.st_size, _etag_of_time(stat))
            return ObjectInfo(key, stat.st_size, self.get_with_etag(key)[1])

    def exists(self, key: str) -> bool:
        return (self._root / key).is_file()

    def open(self, key: str) -> BinaryIO:
        with self._translated("read", key):
            return (self._root / key).open("rb", buffering=READ_BUFFER_BYTES)

    def get(self, key: str) -> bytes:
        with self._translated("read", key):
            return (self._root / key).read_bytes()

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        # Files are replaced, never written over: an open one is one version.
        with self._translated("read", key), (self._root / key).open("rb") as file:
            data = file.read()
            if len(data) > DIGEST_LIMIT_BYTES:
                return data, _etag_of_time(os.fstat(file.fileno()))
            return data, blake2b(data, digest_size=16).hexdigest()

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

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        with self._translated("write", key), self._staged(key, data) as staged, self._locked(key):
            if not self.exists(key) or self.info(key).etag != etag:
                return False
            os.replace(staged, self._root / key)
            return True

    def delete(self, key: str) -> None:
        with self._translated("delete", key):
            if self.exists(key):
                with self._locked(key):
                    (self._root / key).unlink(missing_ok=True)

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
    def _locked(self, key: str) -> Iterator[None]:
        """Alone among those who compare and swap in the folder of `key`, on this machine."""
        # Open for writing, which NFS asks of an exclusive lock. Never removed: who removes a lock's file
        # may take it from under someone who waits for it.
        with (self._root / key).with_name(LOCK_NAME).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

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


def _etag_of_time(stat: os.stat_result) -> str:
    return f"mtime-{stat.st_mtime_ns}"
