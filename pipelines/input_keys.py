"""What an input URI names: a file, all data files of a folder, or those that a glob matches."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from pipelines.errors import NotFound
from pipelines.storage import LocalStore, Store, local_path, open_store
from pipelines.storage_config import StorageConfig

SUFFIXES = (".jsonl", ".ndjson", ".gz", ".zst", ".parquet")


def find_keys(uri: str, settings: StorageConfig | None = None) -> tuple[Store, list[str]]:
    """The store and the keys behind a file, folder or glob, in order of their names. Raises `NotFound`.

    In a folder only names that end in `SUFFIXES` count, and nothing below a name that starts with `_`; a file
    or glob is taken by its word.
    """
    scheme, _, place = uri.partition("://")
    local = not place or scheme == "file"
    found = _in_folder(local_path(uri)) if local else _in_bucket(scheme, place, settings)
    if not found[1]:
        raise NotFound(f"input {uri} does not exist, or nothing in it ends in {', '.join(SUFFIXES)}")
    return found


def _in_folder(path: Path) -> tuple[Store, list[str]]:
    if path.is_dir():
        store = LocalStore(path)
        return store, list(filter(_is_data, store.keys()))
    if path.is_file():
        return LocalStore(path.parent), [path.name]
    folder = Path(*path.parts[: _fixed_parts(path.parts)])
    matches = (Path(match) for match in sorted(glob.glob(str(path), recursive=True)))
    return LocalStore(folder), [match.relative_to(folder).as_posix() for match in matches if match.is_file()]


def _in_bucket(scheme: str, place: str, settings: StorageConfig | None) -> tuple[Store, list[str]]:
    """A key may hold any sign, so one that exists is a file even where it looks like a glob."""
    parts = place.rstrip("/").split("/")
    if len(parts) > 1:
        store = open_store(f"{scheme}://{'/'.join(parts[:-1])}", settings)
        if store.exists(parts[-1]):
            return store, [parts[-1]]
    fixed = _fixed_parts(parts) if glob.has_magic(place) else len(parts)
    store = open_store(f"{scheme}://{'/'.join(parts[:fixed])}", settings)
    keys, pattern = store.keys(), parts[fixed:]
    if not pattern:
        return store, list(filter(_is_data, keys))
    return store, [key for key in keys if _matches(key.split("/"), pattern)]


def _is_data(key: str) -> bool:
    return key.endswith(SUFFIXES) and not any(part.startswith("_") for part in PurePosixPath(key).parts)


def _fixed_parts(parts: Sequence[str]) -> int:
    """How many folders of a path come before the first one with a wildcard; the last part is no folder."""
    return next((number for number, part in enumerate(parts[:-1]) if glob.has_magic(part)), len(parts) - 1)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """True where a glob's parts match those of a key; `**` stands for any number of folders."""
    if not pattern or not parts:
        return not pattern and not parts
    if pattern[0] == "**" and len(pattern) > 1:
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
