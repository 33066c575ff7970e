"""Which files a job reads, what kind each one is, and where a limit ends them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import JobRefused, NotFound
from pipelines.lines import Line, compressed_lines, plain_lines
from pipelines.parse import is_blank
from pipelines.storage import LocalStore, ObjectInfo, Store, local_path

SUFFIXES = (".jsonl", ".ndjson", ".gz", ".zst", ".parquet")
HEAD_BYTES = 256 << 10


class FileKind(StrEnum):
    """How a file is read; told by its first bytes, not by its name."""

    PLAIN = "plain"
    GZIP = "gzip"
    ZSTD = "zstd"
    PARQUET = "parquet"


_MAGIC = {b"PAR1": FileKind.PARQUET, b"\x1f\x8b": FileKind.GZIP, b"\x28\xb5\x2f\xfd": FileKind.ZSTD}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input. `key` is its path under the input folder, and part of each row_id."""

    key: str
    size_bytes: int
    etag: str
    kind: FileKind
    line_bytes: float
    """Mean length of the first lines (of the first rows, uncompressed, for Parquet)."""
    stop: int | None = None
    """Where a limit ends the file: a byte offset for plain files, a row count for the others."""


@dataclass(frozen=True, slots=True)
class Input:
    """The files of a job, and the store that they are in."""

    store: Store
    files: tuple[InputFile, ...]


def find_input(uri: str) -> Input:
    """The files behind a file, folder or glob, in order of their names. Raises `NotFound`."""
    path = local_path(uri)
    if path.is_dir():
        store = LocalStore(path)
        keys = list(filter(_is_data, store.keys()))
    elif path.is_file():
        store, keys = LocalStore(path.parent), [path.name]
    else:
        store = LocalStore(_fixed_part(path))
        matches = (Path(match) for match in sorted(glob.glob(str(path), recursive=True)))
        keys = [match.relative_to(store.uri).as_posix() for match in matches if match.is_file()]
    if not keys:
        wanted = f"no file ending in {', '.join(SUFFIXES)} is in it" if path.is_dir() else "does not exist"
        raise NotFound(f"input {uri}: {wanted}")
    return Input(store, tuple(_inspect(store, store.info(key)) for key in keys))


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


def file_lines(file: BinaryIO, kind: FileKind) -> Iterator[Line]:
    """Every line of a plain or compressed file."""
    return plain_lines(file) if kind is FileKind.PLAIN else compressed_lines(file, kind.value)


def parquet_file(stream: BinaryIO, key: str) -> pq.ParquetFile:
    """An open Parquet file. Raises `JobRefused` where it is none."""
    try:
        return pq.ParquetFile(stream)
    except (pa.ArrowException, OSError) as error:
        raise JobRefused(f"input {key} is not readable Parquet: {error}") from error


def _is_data(key: str) -> bool:
    return key.endswith(SUFFIXES) and not any(part.startswith("_") for part in PurePosixPath(key).parts)


def _fixed_part(path: Path) -> Path:
    """The deepest folder of a glob that has no wildcard."""
    fixed = Path(path.anchor)
    for part in path.parts[1:-1]:
        if glob.has_magic(part):
            break
        fixed /= part
    return fixed


def _inspect(store: LocalStore, info: ObjectInfo) -> InputFile:
    with store.open(info.key) as stream:
        head = stream.read(HEAD_BYTES)
        kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), FileKind.PLAIN)
        if kind is FileKind.PARQUET:
            stream.seek(0, os.SEEK_SET)
            line_bytes = _parquet_row_bytes(parquet_file(stream, info.key))
        else:
            line_bytes = len(head) / max(1, head.count(b"\n"))
    return InputFile(info.key, info.size_bytes, info.etag, kind, line_bytes)


def _parquet_row_bytes(file: pq.ParquetFile) -> float:
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    rows: int = file.metadata.num_rows
    return float(sum(int(group.total_byte_size) for group in groups)) / max(1, rows)


def _count(store: Store, file: InputFile, limit: int) -> tuple[int, int]:
    """Rows of a file, at most `limit`, and where the last of them ends."""
    with store.open(file.key) as stream:
        if file.kind is FileKind.PARQUET:
            rows = min(limit, parquet_file(stream, file.key).metadata.num_rows)
            return rows, rows
        rows = end = 0
        for line in file_lines(stream, file.kind):
            rows += not is_blank(line.raw, line.offset) or line.error is not None
            end = line.offset + 1
            if rows == limit:
                break
        return rows, end if file.kind is FileKind.PLAIN else rows
