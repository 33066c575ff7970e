"""One version of an S3 object as a seekable stream with bounded memory."""

from __future__ import annotations

import contextlib
import io
import os
import time
from typing import TYPE_CHECKING

from botocore.exceptions import IncompleteReadError

from pipelines.errors import JobError
from pipelines.object_info import ObjectInfo
from pipelines.s3_bucket import S3Bucket
from pipelines.s3_errors import FOREIGN, PreconditionFailed, is_transient, translated

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from botocore.response import StreamingBody

# Ranges start small, for footers and first lines, and double while reading goes on without a gap.
FIRST_RANGE_BYTES = 256 << 10
LONGEST_RANGE_BYTES = 64 << 20
READ_BYTES = 256 << 10


class S3Reader(io.RawIOBase):
    """Ranges of the object, streamed one after the other; a cut one goes on where it ended.

    Every request asks for the etag that the object had in the beginning. Reading raises `JobError` where
    the object was replaced meanwhile, and where the store does not answer after all retries.
    """

    def __init__(self, bucket: S3Bucket, key: str, info: ObjectInfo) -> None:
        super().__init__()
        self._bucket = bucket
        self._key = key
        self._size_bytes = info.size_bytes
        self._etag = info.etag
        self._position = 0
        self._body: StreamingBody | None = None
        self._body_position = 0
        self._body_stop = -1
        self._range_bytes = FIRST_RANGE_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"negative seek position {start + offset}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._read(min(len(view), self._size_bytes - self._position))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        data = bytearray()
        while chunk := self._read(self._size_bytes - self._position):
            data += chunk
        return bytes(data)

    def close(self) -> None:
        self._leave()
        super().close()

    def _read(self, wanted: int) -> bytes:
        """The next bytes, at least one where `wanted` is positive; tries again while none come."""
        if wanted <= 0:
            return b""
        pauses = self._bucket.settings.pauses()
        while True:
            try:
                body = self._body_for(wanted)
                chunk: bytes = body.read(min(wanted, READ_BYTES, self._body_stop - self._position))
                if not chunk:
                    left = self._body_stop - self._position
                    raise IncompleteReadError(actual_bytes=0, expected_bytes=left)
            except FOREIGN as error:
                self._cut()
                pause = next(pauses, None) if is_transient(error) else None
                if pause is None:
                    uri, endpoint = self._bucket.uri(self._key), self._bucket.settings.endpoint_url
                    raise translated(error, "read", uri, endpoint) from error
                time.sleep(pause)
            else:
                self._position += len(chunk)
                self._body_position = self._position
                return chunk

    def _body_for(self, wanted: int) -> StreamingBody:
        """A body that goes on at the position."""
        if self._body is not None and self._body_position == self._position < self._body_stop:
            return self._body
        following = self._position == self._body_stop
        longer = min(2 * self._range_bytes, LONGEST_RANGE_BYTES)
        self._range_bytes = longer if following else FIRST_RANGE_BYTES
        self._leave()
        stop = min(self._size_bytes, self._position + max(wanted, self._range_bytes))
        self._body = self._get(self._position, stop)
        self._body_position, self._body_stop = self._position, stop
        return self._body

    def _get(self, start: int, stop: int) -> StreamingBody:
        bucket, key = self._bucket, self._key
        try:
            return bucket.call(
                "read",
                key,
                lambda s3: s3.get_object(
                    Bucket=bucket.name, Key=key, Range=f"bytes={start}-{stop - 1}", IfMatch=f'"{self._etag}"'
                ),
            )["Body"]
        except PreconditionFailed as error:
            raise JobError(
                f"{bucket.uri(key)} was replaced while it was read; leave the input as it is during a job"
            ) from error

    def _leave(self) -> None:
        """Be done with the body; where little of it is left, that is read to keep the connection."""
        if self._body is not None and self._body_stop - self._body_position <= FIRST_RANGE_BYTES:
            # Nothing of it is wanted: that it cannot be read costs the connection only.
            with contextlib.suppress(*FOREIGN):
                self._body.read()
        self._cut()

    def _cut(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None
