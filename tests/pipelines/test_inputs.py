"""Which files are read, as what, and where a limit ends them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.errors import JobRefused, NotFound
from pipelines.inputs import FileKind, apply_limit, find_input


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "1"}\n\n{"prompt": "2"}\n{"prompt": "3"}')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "1"}\n \n{"prompt": "2"}\n'))
    pq.write_table(pa.table({"prompt": ["1", "2", "3"]}), tmp_path / "deep" / "c.parquet")
    for ignored in ("notes.txt", "_log.jsonl", ".hidden.jsonl"):
        (tmp_path / ignored).write_bytes(b"x")
    return tmp_path


def test_a_folder_is_searched_and_the_order_is_that_of_names(folder: Path):
    found = find_input(str(folder))
    assert [(file.key, file.kind) for file in found.files] == [
        ("a.jsonl.gz", FileKind.GZIP),
        ("b.jsonl", FileKind.PLAIN),
        ("deep/c.parquet", FileKind.PARQUET),
    ]


def test_the_first_bytes_tell_the_kind_not_the_name(folder: Path):
    skippable = b"\x5a\x2a\x4d\x18\x00\x00\x00\x00"
    for data, kind in [
        (b'{"prompt": "1"}\n', FileKind.PLAIN),
        (b"", FileKind.PLAIN),
        (gzip.compress(b""), FileKind.GZIP),
        (pa.compress(b"x", "zstd", asbytes=True), FileKind.ZSTD),
        (skippable + pa.compress(b"x", "zstd", asbytes=True), FileKind.ZSTD),
    ]:
        (folder / "some.gz").write_bytes(data)
        assert find_input(str(folder / "some.gz")).files[0].kind is kind


@pytest.mark.parametrize("name", ["nothing.jsonl", "no*.jsonl"])
def test_a_missing_input_is_named(folder: Path, name: str):
    with pytest.raises(NotFound, match=r"input .*no.*\.jsonl does not exist"):
        find_input(str(folder / name))


def test_a_folder_without_data_is_named(tmp_path: Path):
    with pytest.raises(NotFound, match=r"or nothing in it ends in \.jsonl"):
        find_input(str(tmp_path))


def test_broken_parquet_is_named(tmp_path: Path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(JobRefused, match=r"input x\.parquet is not readable Parquet"):
        find_input(str(tmp_path))


@pytest.mark.parametrize(
    ("limit", "stops"),
    [
        (1, [("a.jsonl.gz", 1)]),
        (2, [("a.jsonl.gz", 2)]),
        (3, [("a.jsonl.gz", 2), ("b.jsonl", 1)]),
        (4, [("a.jsonl.gz", 2), ("b.jsonl", 18)]),
        (6, [("a.jsonl.gz", 2), ("b.jsonl", 34), ("deep/c.parquet", 1)]),
        (99, [("a.jsonl.gz", 2), ("b.jsonl", 34), ("deep/c.parquet", 3)]),
    ],
)
def test_a_limit_counts_rows_over_all_files(folder: Path, limit: int, stops: list[tuple[str, int]]):
    limited = apply_limit(find_input(str(folder)), limit)
    assert [(file.key, file.stop) for file in limited.files] == stops


def test_the_groups_of_parquet_are_known_without_reading_it_again(tmp_path: Path):
    pq.write_table(pa.table({"prompt": ["1"] * 7}), tmp_path / "a.parquet", row_group_size=3)
    assert find_input(str(tmp_path)).files[0].group_rows == (3, 3, 1)


def test_many_files_are_in_order_though_they_are_looked_at_side_by_side(tmp_path: Path):
    for number in range(300):
        (tmp_path / f"{number:03d}.jsonl").write_bytes(b"x" * number)
    found = find_input(str(tmp_path))
    assert [(file.key, file.size_bytes) for file in found.files] == [
        (f"{n:03d}.jsonl", n) for n in range(300)
    ]
