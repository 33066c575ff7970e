"""A file on its way from a client into the store, in bounded memory."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest

from pipelines.service.errors import ApiError, invalid
from pipelines.service.file_store import FileRecord, FileStore, FileWriter, NewFile
from pipelines.service.multipart import Event, Form, PartBegin, PartEnd, boundary_of
from pipelines.service.owner_folder import OwnerFolder

PURPOSES = ("batch",)
MAX_FIELD_BYTES = 1024
MAX_FILENAME = 255
# What a form has besides its file.
FORM_BYTES = 64 << 10
DAY_S = 24 * 3600
BATCH_FILES_EXPIRE_S = 30 * DAY_S
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 30 * DAY_S
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)


async def receive_file(
    http: HttpRequest, owner: OwnerFolder, files: FileStore, limit_bytes: int
) -> FileRecord:
    """The file that the request uploads. Raises `ApiError` 400 and 413; nothing is left of it then."""
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit_bytes + FORM_BYTES:
        raise _too_large(limit_bytes)
    parser = Form(boundary_of(http.headers.get("content-type", "")))
    upload = _Upload(owner, files, limit_bytes)
    size = 0
    try:
        async for data in http.stream():
            size += len(data)
            if size > limit_bytes + FORM_BYTES:
                raise _too_large(limit_bytes)
            for event in parser.feed(data):
                upload.take(event)
            if upload.writer is not None and upload.writer.full:
                await asyncio.to_thread(upload.writer.flush)
        parser.close()
        return await asyncio.to_thread(upload.finish)
    except BaseException:
        if upload.writer is not None:
            await asyncio.to_thread(upload.writer.abort)
        raise


class _Upload:
    """The parts of one form."""

    def __init__(self, owner: OwnerFolder, files: FileStore, limit_bytes: int) -> None:
        self._owner = owner
        self._files = files
        self._limit_bytes = limit_bytes
        self._fields: dict[str, bytes] = {}
        self._part = ""
        self.writer: FileWriter | None = None

    def take(self, event: Event) -> None:
        """Raises `ApiError` 400 and 413."""
        if isinstance(event, PartBegin):
            self._begin(event)
        elif isinstance(event, PartEnd):
            if self._part == "purpose":
                self._purpose()
        elif self._part == "file":
            self._take_content(event.data)
        else:
            self._take_field(event.data)

    def finish(self) -> FileRecord:
        """Put the rest. Raises `ApiError` 400 where the form lacks something."""
        if self.writer is None:
            raise invalid("file: field required", "file", "missing_required_parameter")
        return self.writer.finish(self._purpose(), self._expires_after_s())

    def _begin(self, part: PartBegin) -> None:
        self._part = part.name
        if part.name == "file":
            if self.writer is not None:
                raise invalid("file: given twice", "file", "invalid_value")
            if part.filename is None:
                raise invalid("file: not a file, it has no filename", "file", "invalid_value")
            name = part.filename[:MAX_FILENAME] or "upload"
            new = NewFile(owner=self._owner, id=self._files.new_id(), filename=name)
            self.writer = self._files.write(new)
        elif part.name in _FIELDS:
            self._fields[part.name] = b""
        else:
            name = part.name[:100]
            raise invalid(f"{name}: unknown field", name, "unknown_parameter")

    def _take_content(self, data: bytes) -> None:
        assert self.writer is not None
        self.writer.add(data)
        if self.writer.num_bytes > self._limit_bytes:
            raise _too_large(self._limit_bytes)

    def _take_field(self, data: bytes) -> None:
        self._fields[self._part] += data
        if len(self._fields[self._part]) > MAX_FIELD_BYTES:
            raise invalid(f"{self._part}: longer than {MAX_FIELD_BYTES} bytes", self._part, "invalid_value")

    def _purpose(self) -> str:
        purpose = self._field("purpose")
        if purpose is None:
            raise invalid("purpose: field required", "purpose", "missing_required_parameter")
        if purpose not in PURPOSES:
            text = f"purpose: {purpose[:60]!r} has no use here; files are for {', '.join(PURPOSES)}"
            raise invalid(text, "purpose", "invalid_value")
        return purpose

    def _field(self, name: str) -> str | None:
        raw = self._fields.get(name)
        return None if raw is None else raw.decode("utf-8", "replace")

    def _expires_after_s(self) -> int:
        anchor, seconds = self._field(_ANCHOR), self._field(_SECONDS)
        if anchor is None and seconds is None:
            return BATCH_FILES_EXPIRE_S
        number = int(seconds) if seconds and seconds.isdecimal() and len(seconds) < 10 else None
        return checked_expiry(anchor, number, "expires_after")


def checked_expiry(anchor: str | None, seconds: int | None, param: str) -> int:
    """The seconds of an expiration policy. Raises `ApiError` 400."""
    if anchor != "created_at":
        raise invalid(f"{param}.anchor: not created_at", f"{param}.anchor", "invalid_value")
    if seconds is None or not MIN_EXPIRES_S <= seconds <= MAX_EXPIRES_S:
        text = f"{param}.seconds: not a number from {MIN_EXPIRES_S} to {MAX_EXPIRES_S}"
        raise invalid(text, f"{param}.seconds", "invalid_value")
    return seconds


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413, f"the file is larger than the limit of {limit_bytes} bytes", code="file_too_large", param="file"
    )
