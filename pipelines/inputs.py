"""The files of a job: what kind each one is, how long its lines are, and where a limit ends it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import JobRefused
from pipelines.input_keys import find_keys
from pipelines.lines import MAX_LINE_BYTES, Line, compressed_lines, plain_lines
from pipelines.parse import is_blank
from pipelines.storage import Store
from pipelines.storage_config import StorageConfig

HEAD_BYTES = 256 << 10
# Of each column of a row group; a whole row group may be larger than memory.
PARQUET_BUFFER_BYTES = 4 << 20
# Files are looked at side by side: in object stores that is waiting, some tens of milliseconds each.
INSPECTORS = 32


class FileKind(StrEnum):
    """How a file is read; told by its first bytes, not by its name."""

    PLAIN = "plain"
    GZIP = "gzip"
    ZSTD = "zstd"
    PARQUET = "parquet"


_MAGIC = {b"PAR1": FileKind.PARQUET, b"\x1f\x8b": FileKind.GZIP, b"\x28\xb5\x2f\xfd": FileKind.ZSTD}
# Frames without data, which parallel zstd puts before the others.
_MAGIC |= {bytes((low, 0x2A, 0x4D, 0x18)): FileKind.ZSTD for low in range(0x50, 0x60)}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input. `key` is its path under the input folder, and part of each row_id."""

    key: str
    size_bytes: int
    etag: str
    kind: FileKind
    line_bytes: float
    """Mean length of the first lines (of all rows, uncompressed, for Parquet)."""
    group_rows: tuple[int, ...] = ()
    """Rows of each row group, for Parquet."""
    stop: int | None = None
    """Where a limit ends the file: a byte offset for plain files, a row count for the others."""

    @property
    def compressed(self) -> bool:
        """True where only reading it whole tells how many lines it has."""
        return self.kind in (FileKind.GZIP, FileKind.ZSTD)


@dataclass(frozen=True, slots=True)
class Input:
    """The files of a job, and the store that they are in."""

    store: Store
    files: tuple[InputFile, ...]


def find_input(uri: str, settings: StorageConfig | None = None) -> Input:
    """The files behind a file, folder or glob, in order of their names; `settings` are for object stores.

    Raises `NotFound`, and `JobRefused` for Parquet that is not readable.
    """
    store, keys = find_keys(uri, settings)
    with ThreadPoolExecutor(min(INSPECTORS, len(keys))) as pool:
        return Input(store, tuple(pool.map(partial(_inspect, store), keys)))


def apply_limit(source: Input, limit: int | None) -> Input:
    """The input cut behind its first `limit` rows."""
    if limit is None:
        return source
    kept: list[InputFile] = []
    for file in source.files:
        if limit == 0:
            break
        rows, stop = _count(source.store, file, limit)
        kept.append(replace(file, stop=stop))
        limit -= rows
    return replace(source, files=tuple(kept))


def file_lines(file: BinaryIO, kind: FileKind, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Every line of a plain or compressed file."""
    if kind is FileKind.PLAIN:
        return plain_lines(file, max_line_bytes=max_line_bytes)
    return compressed_lines(file, kind.value, max_line_bytes)


def parquet_file(stream: BinaryIO, key: str) -> pq.ParquetFile:
    """An open Parquet file, read in bounded pieces. Raises `JobRefused` where it is none."""
    try:
        return pq.ParquetFile(stream, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise JobRefused(f"input {key} is not readable Parquet: {error}") from error


def _inspect(store: Store, key: str) -> InputFile:
    info = store.info(key)
    groups: tuple[int, ...] = ()
    with store.open(key) as stream:
        head = stream.read(HEAD_BYTES)
        kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), FileKind.PLAIN)
        if kind is FileKind.PARQUET:
            stream.seek(0, os.SEEK_SET)
            metadata = parquet_file(stream, key).metadata
            every = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            groups = tuple(group.num_rows for group in every)
            line_bytes = sum(group.total_byte_size for group in every) / max(1, metadata.num_rows)
        else:
            line_bytes = len(head) / max(1, head.count(b"\n"))
    return InputFile(key, info.size_bytes, info.etag, kind, line_bytes, groups)


def _count(store: Store, file: InputFile, limit: int) -> tuple[int, int]:
    """Rows of a file, at most `limit`, and where the last of them ends."""
    if file.kind is FileKind.PARQUET:
        rows = min(limit, sum(file.group_rows))
        return rows, rows
    with store.open(file.key) as stream:
        rows = end = 0
        for line in file_lines(stream, file.kind):
            rows += line.error is not None or not is_blank(line.raw, line.offset)
            end = line.offset + 1
            if rows == limit:
                break
        return rows, end if file.kind is FileKind.PLAIN else rows
