"""A folder of an S3 bucket as a store, for Amazon's and for what speaks its protocol.

A put becomes visible whole or not at all, and is checked against a checksum by the other side. Conditional
puts need a store that honours If-None-Match and If-Match, as Amazon's, MinIO, Ceph and R2 do.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, cast

from botocore.exceptions import ClientError

from pipelines.errors import JobRefused, NotFound
from pipelines.object_info import ObjectInfo
from pipelines.s3_bucket import S3Bucket
from pipelines.s3_errors import Conflict, PreconditionFailed
from pipelines.s3_reader import S3Reader
from pipelines.s3_upload import Condition, is_mine, new_put_id, upload
from pipelines.storage_config import StorageConfig

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

READ_BUFFER_BYTES = 256 << 10


class S3Store:
    """The objects of a bucket whose keys start with a folder's name."""

    def __init__(self, bucket: str, folder: str, settings: StorageConfig) -> None:
        self._bucket = S3Bucket(bucket, settings)
        self._folder = folder.strip("/")

    @property
    def uri(self) -> str:
        return self._bucket.uri(self._folder)

    def keys(self, prefix: str = "") -> Iterator[str]:
        start = len(self._key(""))
        parent = len(prefix.rpartition("/")[0])
        for page in self._pages(self._key(prefix)):
            for item in page.get("Contents", ()):
                key = item["Key"][start:]
                hidden = any(part.startswith(".") for part in key[parent:].split("/"))
                # Consoles make folders as empty objects with a slash at the end.
                if not hidden and key and not key.endswith("/"):
                    yield key

    def info(self, key: str) -> ObjectInfo:
        place = self._key(key)
        try:
            head = self._bucket.call(
                "read", place, lambda s3: s3.head_object(Bucket=self._bucket.name, Key=place)
            )
        except NotFound:
            # A head has no body that would say whether it is the bucket that is missing.
            self._bucket.call("read", place, self._head_bucket)
            raise
        return ObjectInfo(key, head["ContentLength"], head["ETag"].strip('"'))

    def exists(self, key: str) -> bool:
        place = self._key(key)
        try:
            self._bucket.call("read", place, lambda s3: s3.head_object(Bucket=self._bucket.name, Key=place))
        except NotFound:
            return False
        return True

    def open(self, key: str) -> BinaryIO:
        reader = S3Reader(self._bucket, self._key(key), self.info(key))
        return cast(BinaryIO, io.BufferedReader(reader, READ_BUFFER_BYTES))

    def get(self, key: str) -> bytes:
        return self.get_with_etag(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        place = self._key(key)

        def read(s3: S3Client) -> tuple[bytes, str]:
            answer = s3.get_object(Bucket=self._bucket.name, Key=place, ChecksumMode="ENABLED")
            return answer["Body"].read(), answer["ETag"].strip('"')

        return self._bucket.call("read", place, read)

    def put(self, key: str, data: bytes) -> None:
        upload(self._bucket, self._key(key), data, new_put_id(), Condition())

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._put_on(key, data, Condition(IfNoneMatch="*"))

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        return self._put_on(key, data, Condition(IfMatch=f'"{etag}"'))

    def delete(self, key: str) -> None:
        place = self._key(key)
        self._bucket.call("delete", place, lambda s3: s3.delete_object(Bucket=self._bucket.name, Key=place))

    def _put_on(self, key: str, data: bytes, condition: Condition) -> bool:
        """Put on a condition; whether it went through, be it by a try whose answer was lost."""
        place, put_id = self._key(key), new_put_id()
        pauses = self._bucket.settings.pauses()
        while True:
            try:
                upload(self._bucket, place, data, put_id, condition)
                return True
            except (PreconditionFailed, NotFound):
                return self._is_mine(place, put_id)
            except Conflict:
                if (pause := next(pauses, None)) is None:
                    raise
            time.sleep(pause)

    def _is_mine(self, place: str, put_id: str) -> bool:
        try:
            return is_mine(self._bucket, place, put_id)
        except NotFound:
            return False

    def _pages(self, prefix: str) -> Iterator[ListObjectsV2OutputTypeDef]:
        """Pages of a listing, each retried by itself."""
        name, token = self._bucket.name, ""

        def read(s3: S3Client) -> ListObjectsV2OutputTypeDef:
            if token:
                return s3.list_objects_v2(Bucket=name, Prefix=prefix, ContinuationToken=token)
            return s3.list_objects_v2(Bucket=name, Prefix=prefix)

        while True:
            page = self._bucket.call("list", prefix, read)
            yield page
            token = page.get("NextContinuationToken", "")
            if not token:
                return

    def _head_bucket(self, s3: S3Client) -> None:
        try:
            s3.head_bucket(Bucket=self._bucket.name)
        except ClientError as error:
            if error.response["Error"]["Code"] == "404":
                error.response["Error"]["Code"] = "NoSuchBucket"
            raise

    def _key(self, key: str) -> str:
        return f"{self._folder}/{key}" if self._folder else key


def s3_store(uri: str, settings: StorageConfig) -> S3Store:
    """The store at `s3://bucket/folder`, as this process's environment has it. Raises `JobRefused`."""
    # Not by urlsplit: a key may hold ?, # and %.
    bucket, _, folder = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise JobRefused(f"{uri} names no bucket; write s3://bucket/folder")
    return S3Store(bucket, folder, settings.resolved())
