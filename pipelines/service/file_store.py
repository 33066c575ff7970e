"""Files of owners in the store: a description, and the content in pieces.

    files/<owner>/<id>.json               written last: a file is there whole or not at all
    content/<owner>/<id>/part-00000.jsonl

Pieces are cut behind a line, so nobody ever holds a whole file, and the folder of a file of JSON lines is
the input of a job as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from pipelines.lines import MAX_LINE_BYTES
from pipelines.service.object_table import ObjectTable, Page, PageAsked
from pipelines.service.owner_folder import OwnerFolder
from pipelines.storage import Store

PIECE_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file as it stands in the store."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    pieces: int
    expires_at: int | None = None

    def as_json(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """What a file is to be, before its content has come."""

    owner: OwnerFolder
    id: str
    filename: str


class FileStore:
    """The files under a root. Methods block; they raise `JobError` where the store fails."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._table = ObjectTable(store, "files", "file-", lambda data: FileRecord(**orjson.loads(data)))

    def new_id(self) -> str:
        return self._table.new_id(self._clock())

    def write(self, new: NewFile) -> FileWriter:
        return FileWriter(self._store, self._table, new, self._clock)

    def find(self, owner: OwnerFolder, file_id: str) -> FileRecord | None:
        """The file, unless it is another owner's, deleted, or expired."""
        found = self._table.find(owner, file_id)
        if found is None or self._expired(found[0]):
            return None
        return found[0]

    def page(self, owner: OwnerFolder, asked: PageAsked, purpose: str | None) -> Page[FileRecord]:
        return self._table.page(
            owner,
            asked,
            lambda record: purpose in (None, record.purpose) and not self._expired(record),
        )

    def delete(self, owner: OwnerFolder, file_id: str) -> None:
        """Remove a file and its content; no error where it is not there."""
        found = self._table.find(owner, file_id)
        if found is not None:
            self._table.delete(owner, file_id)
            for number in range(found[0].pieces):
                self._store.delete(piece_key(owner, file_id, number))

    def delete_expired(self, owner: OwnerFolder) -> int:
        """Remove the owner's files whose time is over; how many they were."""
        everything = self._table.page(owner, PageAsked(limit=1 << 60), self._expired)
        for record in everything.items:
            self.delete(owner, record.id)
        return len(everything.items)

    def owners(self) -> list[OwnerFolder]:
        """Whoever has a file."""
        return sorted({OwnerFolder(key.split("/")[1]) for key in self._store.keys("files/")})

    def blocks(self, owner: OwnerFolder, record: FileRecord) -> Iterator[bytes]:
        """The content in pieces of bounded size."""
        for number in range(record.pieces):
            with self._store.open(piece_key(owner, record.id, number)) as stream:
                while block := stream.read(BLOCK_BYTES):
                    yield block

    def lines(self, owner: OwnerFolder, record: FileRecord) -> Iterator[bytes]:
        """The content's lines without their line feeds. Raises `NotFound` where it is deleted meanwhile."""
        for number in range(record.pieces):
            data = self._store.get(piece_key(owner, record.id, number))
            yield from data.removesuffix(b"\n").split(b"\n")

    def content_uri(self, owner: OwnerFolder, file_id: str) -> str:
        """The folder of a file's pieces."""
        return f"{self._store.uri}/{content_folder(owner, file_id)}"

    def _expired(self, record: FileRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self._clock()


class FileWriter:
    """A file on its way into the store. `flush` it when it is `full`; at the end `finish` or `abort`."""

    def __init__(
        self, store: Store, table: ObjectTable[FileRecord], new: NewFile, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._table = table
        self._new = new
        self._clock = clock
        self._buffer = bytearray()
        self._cut = 0
        self._pieces = 0
        self.num_bytes = 0

    @property
    def full(self) -> bool:
        enough = len(self._buffer) >= PIECE_BYTES
        return enough and (self._cut > 0 or len(self._buffer) >= MAX_LINE_BYTES)

    def add(self, data: bytes) -> None:
        """Take more of the content; does not block."""
        line_end = data.rfind(b"\n")
        if line_end >= 0:
            self._cut = len(self._buffer) + line_end + 1
        self._buffer += data
        self.num_bytes += len(data)

    def write(self, data: bytes) -> None:
        """`add`, and `flush` where that made it full."""
        self.add(data)
        if self.full:
            self.flush()

    def flush(self) -> None:
        """Put what is there up to the last line's end, or all of a line that is longer than any may be."""
        self._put(self._cut or len(self._buffer))

    def finish(self, purpose: str, expires_after_s: int | None) -> FileRecord:
        """Put the rest and the description; from now on the file is there."""
        if self._buffer:
            self._put(len(self._buffer))
        new, now = self._new, int(self._clock())
        record = FileRecord(
            id=new.id,
            bytes=self.num_bytes,
            created_at=now,
            filename=new.filename,
            purpose=purpose,
            pieces=self._pieces,
            expires_at=None if expires_after_s is None else now + expires_after_s,
        )
        # A plain put: files of a batch are written again where their writer died before it said so.
        self._table.put(new.owner, new.id, asdict(record))
        return record

    def abort(self) -> None:
        """Remove the pieces that are put."""
        for number in range(self._pieces):
            self._store.delete(piece_key(self._new.owner, self._new.id, number))

    def _put(self, num_bytes: int) -> None:
        data = bytes(memoryview(self._buffer)[:num_bytes])
        self._store.put(piece_key(self._new.owner, self._new.id, self._pieces), data)
        self._pieces += 1
        del self._buffer[:num_bytes]
        self._cut = 0


def content_folder(owner: OwnerFolder, file_id: str) -> str:
    return f"content/{owner}/{file_id}"


def piece_key(owner: OwnerFolder, file_id: str, number: int) -> str:
    return f"{content_folder(owner, file_id)}/part-{number:05d}.jsonl"
