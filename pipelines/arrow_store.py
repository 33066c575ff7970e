"""Other object stores and HDFS through pyarrow: for reading only.

pyarrow's output streams become objects when they are closed, be it by an exception half-way, and know no
conditional put; results written with them could be cut off or taken from another job.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import BinaryIO, NoReturn, cast

import pyarrow as pa
from pyarrow import fs

from pipelines.errors import JobError, JobRefused, NotFound
from pipelines.object_info import ObjectInfo

READ_BUFFER_BYTES = 1 << 20


class ArrowStore:
    """A folder of a file system that pyarrow can read; `folder` is its path there, `uri` the user's name."""

    def __init__(self, uri: str, filesystem: fs.FileSystem, folder: str) -> None:
        self._uri = uri.rstrip("/")
        self._filesystem = filesystem
        self._folder = folder.rstrip("/")

    @property
    def uri(self) -> str:
        return self._uri

    def keys(self, prefix: str = "") -> Iterator[str]:
        parent = prefix.rpartition("/")[0]
        selector = fs.FileSelector(self._path(parent), allow_not_found=True, recursive=True)
        with self._translated("list", prefix):
            found = self._filesystem.get_file_info(selector)
        start = len(self._path("")) + 1
        for key in sorted(info.path[start:] for info in found if info.type == fs.FileType.File):
            hidden = any(part.startswith(".") for part in key[len(parent) :].split("/"))
            if key.startswith(prefix) and not hidden:
                yield key

    def info(self, key: str) -> ObjectInfo:
        with self._translated("read", key):
            info = self._filesystem.get_file_info(self._path(key))
        if info.type != fs.FileType.File:
            raise NotFound(f"{self._uri}/{key} does not exist")
        return ObjectInfo(key, info.size, f"mtime-{info.mtime_ns}")

    def exists(self, key: str) -> bool:
        with self._translated("read", key):
            found: bool = self._filesystem.get_file_info(self._path(key)).type == fs.FileType.File
        return found

    def open(self, key: str) -> BinaryIO:
        with self._translated("read", key):
            stream = self._filesystem.open_input_file(self._path(key))
        return cast(BinaryIO, io.BufferedReader(stream, READ_BUFFER_BYTES))

    def get(self, key: str) -> bytes:
        with self._translated("read", key), self._filesystem.open_input_file(self._path(key)) as stream:
            data: bytes = stream.read()
        return data

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        self._refuse()

    def put(self, key: str, data: bytes) -> None:
        self._refuse()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._refuse()

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        self._refuse()

    def delete(self, key: str) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise JobRefused(
            f"{self._uri} can be read but not written: its puts are neither whole nor conditional here; "
            "write to a folder or to s3:// (many stores speak that too, see storage.endpoint_url)"
        )

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}" if key else self._folder

    @contextlib.contextmanager
    def _translated(self, act: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{self._uri}/{key} does not exist") from error
        except PermissionError as error:
            raise JobRefused(f"cannot {act} {self._uri}/{key}: access denied: {error}") from error
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"cannot {act} {self._uri}/{key}: {error}") from error


def arrow_store(uri: str) -> ArrowStore:
    """The store at a URI that pyarrow knows. Raises `JobRefused` where it cannot be reached that way."""
    try:
        filesystem, folder = fs.FileSystem.from_uri(uri)
    except (OSError, pa.ArrowException) as error:
        raise JobRefused(f"{uri} cannot be opened: {error}") from error
    return ArrowStore(uri, filesystem, folder)
