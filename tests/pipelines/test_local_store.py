"""Files as a store: nothing is left half done, and a lock goes with its holder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelines.errors import JobError
from pipelines.local_store import DIGEST_LIMIT_BYTES, LOCK_NAME, LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def test_a_put_that_breaks_leaves_neither_object_nor_rest(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    def broken(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(JobError, match=r"cannot write .*/root/key: No space left on device"):
        store.put("key", b"data")
    assert os.listdir(store.uri) == []


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
    assert store.get_with_etag("key") == (b"b" * size, store.info("key").etag)


def test_the_etag_of_a_small_file_survives_copying(store: LocalStore):
    store.put("key", b"text")
    store.put("copy", b"text")
    os.utime(Path(store.uri) / "copy", (0, 0))
    assert store.info("key").etag == store.info("copy").etag


def test_the_lock_of_a_process_that_was_killed_is_free(store: LocalStore):
    store.put("lease", b"first")
    lock = Path(store.uri) / LOCK_NAME
    hold = "import fcntl, sys; lock = open(sys.argv[1], 'ab'); fcntl.flock(lock, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{hold}; print(flush=True); sys.stdin.read()", str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"\n"
        with lock.open("ab") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.kill()
    assert store.put_if_match("lease", b"second", store.info("lease").etag)


def test_a_swap_waits_for_the_one_before_it(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    store.put("lease", b"first")
    etag = store.info("lease").etag
    flock, replace = fcntl.flock, os.replace
    second_waits = threading.Event()

    def seen_flock(file: object, operation: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            second_waits.set()
        flock(file, operation)

    def slow_replace(staged: Path, target: Path) -> None:
        """The first has compared and is about to replace; now the second comes."""
        if threading.current_thread() is threading.main_thread():
            answers.append(pool.submit(store.put_if_match, "lease", b"second", etag))
            assert second_waits.wait(10)
        replace(staged, target)

    answers: list[Future[bool]] = []
    monkeypatch.setattr(fcntl, "flock", seen_flock)
    monkeypatch.setattr(os, "replace", slow_replace)
    with ThreadPoolExecutor(1) as pool:
        assert store.put_if_match("lease", b"mine", etag)
        assert not answers[0].result()
    assert store.get("lease") == b"mine"
