"""Local files as a store: whole objects or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines.errors import JobError, JobRefused, NotFound
from pipelines.storage import DIGEST_LIMIT_BYTES, LocalStore, local_path, open_store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def test_what_is_put_can_be_listed_and_read(store: LocalStore):
    store.put("data/b", b"2")
    store.put("data/a", b"1")
    store.put("other", b"3")
    assert list(store.keys()) == ["data/a", "data/b", "other"]
    assert list(store.keys("data/")) == ["data/a", "data/b"]
    assert store.get("data/a") == b"1"
    with store.open("data/b") as stream:
        assert stream.read() == b"2"


def test_a_put_replaces_and_a_conditional_put_does_not(store: LocalStore):
    assert store.put_if_absent("key", b"first")
    assert not store.put_if_absent("key", b"second")
    assert store.get("key") == b"first"
    store.put("key", b"third")
    assert store.get("key") == b"third"


def test_a_put_that_breaks_leaves_neither_object_nor_rest(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    def broken(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(JobError, match=r"cannot write .*/root/key: No space left on device"):
        store.put("key", b"data")
    assert os.listdir(store.uri) == []


def test_hidden_files_are_not_listed(store: LocalStore):
    store.put(".part.tmp", b"")
    store.put("data/.x/y", b"")
    assert list(store.keys()) == []


def test_a_missing_object_is_named(store: LocalStore):
    for act in (store.get, store.open, store.info):
        with pytest.raises(NotFound, match="root/nothing does not exist"):
            act("nothing")
    assert not store.exists("nothing")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JobError, match="cannot write"):
        LocalStore(tmp_path / "file" / "folder").put("key", b"")


@pytest.mark.parametrize("size", [10, DIGEST_LIMIT_BYTES + 1])
def test_the_etag_follows_the_content(store: LocalStore, size: int):
    store.put("key", b"a" * size)
    before = store.info("key")
    store.put("key", b"b" * size)
    assert store.info("key").size_bytes == before.size_bytes == size
    assert store.info("key").etag != before.etag


def test_the_etag_of_a_small_file_survives_copying(store: LocalStore):
    store.put("key", b"text")
    store.put("copy", b"text")
    os.utime(Path(store.uri) / "copy", (0, 0))
    assert store.info("key").etag == store.info("copy").etag


def test_paths_and_file_uris_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert local_path("a b") == local_path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert open_store("x").uri == str(tmp_path / "x")


def test_a_scheme_that_is_not_known_is_refused():
    with pytest.raises(JobRefused, match="scheme ftp:// is not supported"):
        open_store("ftp://host/x")
