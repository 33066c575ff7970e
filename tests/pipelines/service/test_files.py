"""Files, used with OpenAI's own client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from starlette.requests import ClientDisconnect, Request

from pipelines.service import file_store
from pipelines.service.errors import ApiError
from pipelines.service.file_store import FileStore
from pipelines.service.file_upload import receive_file
from pipelines.service.keys import key_hash
from pipelines.service.owner_folder import owner_folder
from pipelines.storage import open_store
from tests.pipelines.service.batch_world import Clock, batch_world, upload
from tests.pipelines.service.scripted import world
from tests.pipelines.service.scripted_jobs import ScriptedSubmitter

DAY_S = 24 * 3600
FORM_HEAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
)


@pytest.fixture
def here(tmp_path):
    with batch_world(tmp_path / "root", ScriptedSubmitter(), max_file_bytes=10_000) as made:
        yield made


def objects(root: Path) -> list[Path]:
    """What is left in a store, but for the controller's lease."""
    return [path for path in root.rglob("*") if path.is_file() and path.name[0] not in "._"]


def test_a_file_is_uploaded_described_read_and_deleted(here):
    content = b'{"a": 1}\n\xff\x00 not even text'
    with here.client() as api:
        made = api.files.create(file=("näme.jsonl", content), purpose="batch")
        assert (made.object, made.bytes, made.filename) == ("file", len(content), "näme.jsonl")
        assert (made.purpose, made.status) == ("batch", "processed")
        assert made.expires_at == made.created_at + 30 * DAY_S
        assert api.files.retrieve(made.id) == made
        assert list(api.files.list()) == [made]
        assert api.files.content(made.id).content == content
        gone = api.files.delete(made.id)
        assert (gone.id, gone.deleted) == (made.id, True)
        for ask in (api.files.retrieve, api.files.content, api.files.delete):
            with pytest.raises(openai.NotFoundError, match="no such file"):
                ask(made.id)
        assert list(api.files.list()) == []


def test_a_large_file_is_kept_in_pieces_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "PIECE_BYTES", 1000)
    lines = [b"x" * (number * 37 % 2500) + b"\n" for number in range(400)]
    content = b"".join(lines) + b"no line feed"
    root = tmp_path / "root"
    with batch_world(root, ScriptedSubmitter()) as here, here.client() as api:
        made = upload(api, content)
        assert api.files.content(made).content == content
        pieces = [path.read_bytes() for path in sorted(root.rglob("part-*.jsonl"))]
        assert len(pieces) > 3
        assert all(piece.endswith(b"\n") for piece in pieces[:-1])
        api.files.delete(made)
    assert objects(root) == []


def test_a_line_that_never_ends_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "PIECE_BYTES", 1000)
    monkeypatch.setattr(file_store, "MAX_LINE_BYTES", 5000)
    content = b"x" * 2_000_000
    with batch_world(tmp_path / "root", ScriptedSubmitter()) as here, here.client() as api:
        assert api.files.content(upload(api, content)).content == content
        sizes = [path.stat().st_size for path in (tmp_path / "root").rglob("part-*.jsonl")]
    # As much as the socket had ready when the limit was passed.
    assert max(sizes) < 1_000_000


def test_a_file_over_the_limit_is_refused_by_its_header_and_by_its_bytes(here, tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "PIECE_BYTES", 1000)
    form = {"content-type": "multipart/form-data; boundary=b"}
    for size in (10_001, 200_000):
        pieces = [FORM_HEAD, *[b"line\n" * 200] * (size // 1000), b"x" * (size % 1000), b"\r\n--b--\r\n"]
        for content in (b"".join(pieces), iter(pieces)):
            answer = here.http.post(f"{here.url}/v1/files", content=content, headers=form)
            assert answer.status_code == 413, answer.text
            assert answer.json()["error"]["code"] == "file_too_large"
            assert "10000 bytes" in answer.json()["error"]["message"]
    assert objects(tmp_path / "root") == []
    with here.client() as api:
        assert api.files.retrieve(upload(api, b"x" * 10_000)).bytes == 10_000


@pytest.mark.parametrize("end", ["too large", "the client goes"])
def test_nothing_is_left_of_an_upload_that_breaks_off(tmp_path, monkeypatch, end):
    monkeypatch.setattr(file_store, "PIECE_BYTES", 1000)
    files = FileStore(open_store(str(tmp_path)), Clock())
    pieces = [FORM_HEAD, *[b"line\n" * 200] * 5]
    on_disk: list[int] = []

    async def receive() -> dict[str, Any]:
        on_disk.append(len(objects(tmp_path)))
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": True}
        return {"type": "http.disconnect"}

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    http = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    limit_bytes = 4500 if end == "too large" else 10_000
    with pytest.raises(ApiError if end == "too large" else ClientDisconnect):
        asyncio.run(receive_file(http, owner_folder("a"), files, limit_bytes))
    assert max(on_disk) >= 3
    assert objects(tmp_path) == []


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"file": ("f", b"x")}}, "purpose"),
        ({"files": {"file": ("f", b"x")}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"other": ("f", b"x")}, "data": {"purpose": "batch"}}, "other"),
        ({"files": {"purpose": (None, b"batch")}}, "file"),
        ({"files": {"file": (None, b"x")}, "data": {"purpose": "batch"}}, "file"),
        ({"files": [("file", ("f", b"x")), ("file", ("g", b"x"))], "data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": ("f", b"x")}, "data": {"purpose": "b" * 2000}}, "purpose"),
        ({"files": {"file": ("f", b"x")}, "data": {"purpose": "batch", "colour": "red"}}, "colour"),
        (
            {"files": {"file": ("f", b"x")}, "data": {"purpose": "batch", "expires_after[anchor]": "now"}},
            "expires_after.anchor",
        ),
        (
            {
                "files": {"file": ("f", b"x")},
                "data": {
                    "purpose": "batch",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "60",
                },
            },
            "expires_after.seconds",
        ),
        ({"json": {"purpose": "batch"}}, None),
    ],
    ids=str,
)
def test_a_form_that_lacks_something_is_refused_by_its_name(here, tmp_path, form: Any, param):
    answer = here.http.post(f"{here.url}/v1/files", **form)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert objects(tmp_path / "root") == []


def test_a_list_is_paged_from_the_latest_or_from_the_first(here):
    with here.client() as api:
        made = [upload(api, b"x") for _ in range(5)]
        assert [file.id for file in api.files.list(limit=2)] == made[::-1]
        assert [file.id for file in api.files.list(limit=2, order="asc")] == made
        page = api.files.list(limit=2, after=made[2])
        assert ([file.id for file in page.data], page.has_more) == ([made[1], made[0]], False)
        # A cursor keeps its place when its file is gone.
        api.files.delete(made[2])
        assert [file.id for file in api.files.list(limit=1, after=made[2])] == [made[1], made[0]]
        assert list(api.files.list(purpose="batch_output")) == []
        for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError):
                api.files.list(**wrong)


def test_a_file_is_gone_when_its_time_is_over(tmp_path):
    clock, root = Clock(), tmp_path / "root"
    with batch_world(root, ScriptedSubmitter(), clock=clock) as here, here.client() as api:
        short: Any = {"anchor": "created_at", "seconds": 3600}
        made = api.files.create(file=("f", b"x"), purpose="batch", expires_after=short)
        kept = upload(api, b"y")
        assert made.expires_at == made.created_at + 3600
        clock.now += 3601
        with pytest.raises(openai.NotFoundError):
            api.files.retrieve(made.id)
        assert [file.id for file in api.files.list()] == [kept]
        assert list(root.rglob(f"*{made.id}*"))
        for owner in here.batches.files.owners():
            here.batches.files.delete_expired(owner)
        assert not [path for path in root.rglob(f"*{made.id}*") if path.is_file()]
        assert api.files.content(kept).content == b"y"


def test_nobody_sees_the_files_of_another_key(tmp_path):
    keys = tmp_path / "keys.yaml"
    # Names that a disk may take for one another, or for a path.
    owners = {"sk-a": "Team", "sk-b": "team", "sk-c": "../team", "sk-d": "*"}
    entries = [{"hash": key_hash(key), "owner": owner} for key, owner in owners.items()]
    keys.write_text(yaml.safe_dump({"keys": entries}))
    with batch_world(tmp_path / "root", ScriptedSubmitter(), service={"keys": keys}) as here:
        apis = {key: here.client(key) for key in owners}
        made = {key: upload(api, key.encode()) for key, api in apis.items()}
        for key, api in apis.items():
            assert [file.id for file in api.files.list()] == [made[key]]
            assert api.files.content(made[key]).content == key.encode()
            for other in made.keys() - {key}:
                for ask in (api.files.retrieve, api.files.content, api.files.delete):
                    with pytest.raises(openai.NotFoundError) as refusal:
                        ask(made[other])
                    # As for a file that never was.
                    missing = made[other][:-1] + ("0" if made[other][-1] != "0" else "1")
                    with pytest.raises(openai.NotFoundError) as nothing:
                        ask(missing)
                    said = refusal.value.message.replace(made[other], missing)
                    assert said == nothing.value.message
        assert here.http.get(f"{here.url}/v1/files").status_code == 401
        assert here.http.post(f"{here.url}/v1/files", content=b"{").status_code == 401


@pytest.mark.parametrize("name", ["..%2f..%2fkeys", "file-", "file-xyz", "%00", "file-" + "g" * 44])
def test_an_id_that_is_none_is_not_there(here, name):
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        assert here.http.get(here.url + path).status_code == 404


def test_a_service_without_a_root_says_so():
    with world() as plain:
        for path in ("/v1/files", "/v1/batches", "/v1/files/file-1/content"):
            answer = plain.http.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "batches_not_configured"
            assert "section batches" in answer.json()["error"]["message"]
