"""What a URI names, on disk and in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines import input_keys
from pipelines.errors import NotFound
from pipelines.input_keys import find_keys

NAMES = (
    "b.jsonl",
    "a.jsonl.gz",
    "deep/c.parquet",
    "deep/er/d.jsonl",
    "notes.txt",
    "_log.jsonl",
    "_x/y.jsonl",
)


@dataclass(frozen=True)
class Bucket:
    """The keys of a bucket under a root, in order."""

    uri: str

    def _all(self) -> Iterator[str]:
        root = self.uri.rstrip("/") + "/"
        for name in sorted(NAMES):
            if (full := f"s3://shop/in/{name}").startswith(root):
                yield full.removeprefix(root)

    def keys(self, prefix: str = "") -> Iterator[str]:
        yield from (key for key in self._all() if key.startswith(prefix))

    def exists(self, key: str) -> bool:
        return key in self._all()


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "bucket":
        monkeypatch.setattr(input_keys, "open_store", lambda uri, settings: Bucket(uri))
        return "s3://shop/in"
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "root", "keys"),
    [
        ("", "", ["a.jsonl.gz", "b.jsonl", "deep/c.parquet", "deep/er/d.jsonl"]),
        ("/", "", ["a.jsonl.gz", "b.jsonl", "deep/c.parquet", "deep/er/d.jsonl"]),
        ("/deep", "/deep", ["c.parquet", "er/d.jsonl"]),
        ("/b.jsonl", "", ["b.jsonl"]),
        ("/notes.txt", "", ["notes.txt"]),
        ("/deep/c.parquet", "/deep", ["c.parquet"]),
        ("/*.jsonl", "", ["_log.jsonl", "b.jsonl"]),
        ("/*.jsonl*", "", ["_log.jsonl", "a.jsonl.gz", "b.jsonl"]),
        ("/**/*.parquet", "", ["deep/c.parquet"]),
        ("/**/*.jsonl", "", ["_log.jsonl", "_x/y.jsonl", "b.jsonl", "deep/er/d.jsonl"]),
        ("/d*p/*", "", ["deep/c.parquet"]),
        ("/deep/*/?.jsonl", "/deep", ["er/d.jsonl"]),
        ("/[ab].*", "", ["a.jsonl.gz", "b.jsonl"]),
    ],
)
def test_files_folders_and_globs_name_the_same_everywhere(
    place: str, pattern: str, root: str, keys: list[str]
):
    store, found = find_keys(place + pattern)
    assert (store.uri.rstrip("/"), found) == (place + root, keys)


@pytest.mark.parametrize("pattern", ["/nothing.jsonl", "/no*.jsonl", "/deep/no", "/**/no/*"])
def test_what_names_nothing_is_told(place: str, pattern: str):
    with pytest.raises(NotFound, match=r"does not exist, or nothing in it ends in \.jsonl"):
        find_keys(place + pattern)


def test_a_file_uri_is_a_path(tmp_path: Path):
    (tmp_path / "a b.jsonl").write_bytes(b"x")
    store, keys = find_keys(f"file://{tmp_path}/a%20b.jsonl")
    assert (store.uri, keys) == (str(tmp_path), ["a b.jsonl"])
