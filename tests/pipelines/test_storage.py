"""What every store promises, of files and of a real S3 server alike."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelines.errors import JobRefused, NotFound
from pipelines.storage import LocalStore, Store, lies_under, local_path, open_store
from tests.pipelines.s3_server import S3


@pytest.fixture(params=["local", "s3", "whole bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "root")
    s3: S3 = request.getfixturevalue("s3")
    return s3.store("" if request.param == "whole bucket" else "root/in?side %41")


def test_what_is_put_can_be_listed_and_read(store: Store):
    store.put("data/b", b"2")
    store.put("data/a", b"1")
    store.put("other", b"3")
    store.put("database", b"4")
    assert list(store.keys()) == ["data/a", "data/b", "database", "other"]
    assert list(store.keys("data/")) == ["data/a", "data/b"]
    assert list(store.keys("data")) == ["data/a", "data/b", "database"]
    assert list(store.keys("none/")) == []
    assert store.get("data/a") == b"1"
    with store.open("data/b") as stream:
        assert stream.read() == b"2"


def test_keys_may_hold_any_sign(store: Store):
    keys = ["a b", "a#b", "a%41", "a+b", "a?b", "ä/日本"]
    for key in keys:
        store.put(key, key.encode())
    assert list(store.keys()) == sorted(keys)
    assert [store.get(key) for key in keys] == [key.encode() for key in keys]


def test_a_put_replaces_and_a_conditional_put_does_not(store: Store):
    assert store.put_if_absent("key", b"first")
    assert not store.put_if_absent("key", b"second")
    assert store.get("key") == b"first"
    store.put("key", b"third")
    assert store.get("key") == b"third"


def test_only_the_object_that_was_read_is_swapped(store: Store):
    store.put("lease", b"first")
    data, etag = store.get_with_etag("lease")
    assert (data, etag) == (b"first", store.info("lease").etag)
    assert store.put_if_match("lease", b"second", etag)
    assert not store.put_if_match("lease", b"third", etag)
    assert store.get("lease") == b"second"


def test_what_is_gone_is_not_swapped(store: Store):
    store.put("lease", b"first")
    etag = store.info("lease").etag
    store.delete("lease")
    store.delete("lease")
    assert not store.put_if_match("lease", b"second", etag)
    assert not store.exists("lease")
    assert list(store.keys()) == []


def test_of_many_who_swap_at_once_one_wins(store: Store):
    store.put("lease", b"nobody")
    etag = store.info("lease").etag
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: store.put_if_match("lease", str(n).encode(), etag), range(16)))
    assert won.count(True) == 1
    assert store.get("lease") == str(won.index(True)).encode()


def test_of_many_who_are_first_one_wins(store: Store):
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: store.put_if_absent("key", str(n).encode()), range(16)))
    assert won.count(True) == 1
    assert store.get("key") == str(won.index(True)).encode()


def test_hidden_objects_are_not_listed(store: Store):
    store.put(".part.tmp", b"")
    store.put("data/.x/y", b"")
    store.put("data/y", b"")
    assert list(store.keys()) == ["data/y"]
    assert list(store.keys("data/.x/")) == ["data/.x/y"]


def test_a_missing_object_is_named(store: Store):
    for act in (store.get, store.open, store.info, store.get_with_etag):
        with pytest.raises(NotFound, match=r"/nothing does not exist"):
            act("nothing")
    assert not store.exists("nothing")


def test_a_store_can_be_sent_to_another_process(store: Store):
    store.put("key", b"data")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.uri == store.uri
    assert copy.get("key") == b"data"


def test_an_empty_object_is_read(store: Store):
    store.put("empty", b"")
    assert store.info("empty").size_bytes == 0
    with store.open("empty") as stream:
        assert stream.read() == b""


def test_paths_and_file_uris_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert local_path("a b") == local_path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert open_store("x").uri == str(tmp_path / "x")


def test_a_uri_opens_the_store_it_names(s3: S3):
    store = open_store(f"s3://{s3.bucket}/a%20b/", s3.settings())
    store.put("key", b"data")
    assert store.uri == f"s3://{s3.bucket}/a%20b"
    assert s3.direct.get_object(Bucket=s3.bucket, Key="a%20b/key")["Body"].read() == b"data"


def test_a_scheme_that_is_not_known_is_refused():
    with pytest.raises(JobRefused, match="scheme ftp:// is not supported"):
        open_store("ftp://host/x")
    with pytest.raises(JobRefused, match="names no bucket"):
        open_store("s3:///x")


def test_it_is_seen_what_lies_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert lies_under("out/data/x", f"file://{tmp_path}/out")
    assert lies_under("s3://bucket/out", "s3://bucket/out/")
    assert lies_under("s3://bucket/out/x", "s3://bucket")
    assert not lies_under("s3://bucket/output", "s3://bucket/out")
    assert not lies_under("s3://buckets", "s3://bucket")
    assert not lies_under("out", "out/data")
