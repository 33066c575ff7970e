"""pyarrow's file systems as a store to read from; its own local one stands for those in the network."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from pipelines.arrow_store import ArrowStore
from pipelines.errors import JobRefused, NotFound
from pipelines.storage import open_store


@pytest.fixture
def store(tmp_path: Path) -> ArrowStore:
    for key in ("data/a.jsonl", "data/b.jsonl", "data/.hidden", "other"):
        path = tmp_path / "root" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"content of {key}".encode())
    return ArrowStore("gs://bucket/root/", fs.LocalFileSystem(), f"{tmp_path}/root/")


def test_objects_are_listed_and_read(store: ArrowStore):
    assert store.uri == "gs://bucket/root"
    assert list(store.keys()) == ["data/a.jsonl", "data/b.jsonl", "other"]
    assert list(store.keys("data/b")) == ["data/b.jsonl"]
    assert list(store.keys("nothing/")) == []
    assert store.get("other") == b"content of other"
    assert store.info("other").size_bytes == 16
    assert store.exists("other") and not store.exists("data")


def test_the_etag_follows_the_object(store: ArrowStore, tmp_path: Path):
    before = store.info("other").etag
    (tmp_path / "root" / "other").write_bytes(b"replaced twice")
    assert store.info("other").etag != before


def test_a_stream_can_be_read_at_any_place(store: ArrowStore, tmp_path: Path):
    table = pa.table({"number": range(1000)})
    pq.write_table(table, tmp_path / "root" / "table.parquet")
    with store.open("table.parquet") as stream:
        assert stream.seek(-4, io.SEEK_END) and stream.read() == b"PAR1"
        stream.seek(0)
        assert pq.ParquetFile(stream).read() == table


def test_a_missing_object_is_named(store: ArrowStore):
    for act in (store.get, store.open, store.info):
        with pytest.raises(NotFound, match="gs://bucket/root/nothing does not exist"):
            act("nothing")


def test_a_store_can_be_sent_to_another_process(store: ArrowStore):
    assert pickle.loads(pickle.dumps(store)).get("other") == b"content of other"


def test_writing_is_refused(store: ArrowStore):
    for act in (
        lambda: store.put("key", b""),
        lambda: store.put_if_absent("key", b""),
        lambda: store.put_if_match("key", b"", "etag"),
        lambda: store.delete("key"),
    ):
        with pytest.raises(JobRefused, match=r"gs://bucket/root can be read but not written.*s3://"):
            act()


def test_google_and_azure_are_opened_by_their_uris():
    assert open_store("gs://bucket/folder").uri == "gs://bucket/folder"
    assert open_store("gs://bucket").uri == "gs://bucket"
