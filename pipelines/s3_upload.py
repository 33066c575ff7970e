"""Puts to S3: one request, or parts that become an object when all of them are up.

Every put has an id of its own in the object's metadata. It tells a put whose answer was lost (and whose
repetition is refused, because the object is there) from one that came too late.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, TypedDict

from pipelines.errors import JobError
from pipelines.s3_bucket import S3Bucket
from pipelines.s3_errors import UploadGone

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

WHOLE_LIMIT_BYTES = 64 << 20
# Stores take at most 10,000 parts, and none but the last below 5 MiB.
PART_BYTES = 32 << 20
PARTS_AT_ONCE = 4
PUT_ID = "put-id"


class Condition(TypedDict, total=False):
    """What must hold of the object that is there for a put to go through."""

    IfNoneMatch: str
    IfMatch: str


def new_put_id() -> str:
    return uuid.uuid4().hex


def upload(bucket: S3Bucket, key: str, data: bytes, put_id: str, condition: Condition) -> None:
    """Make `data` the object at `key`, at once and as a whole.

    Raises `PreconditionFailed`, also where an earlier try of this very put is what stands in the way.
    """
    if len(data) <= WHOLE_LIMIT_BYTES:
        _put_whole(bucket, key, data, put_id, condition)
    else:
        _put_parts(bucket, key, data, put_id, condition)


def is_mine(bucket: S3Bucket, key: str, put_id: str) -> bool:
    """Whether the object at `key` comes from this put. Raises `NotFound`."""
    head = bucket.call("read", key, lambda s3: s3.head_object(Bucket=bucket.name, Key=key))
    return head["Metadata"].get(PUT_ID) == put_id


def _put_whole(bucket: S3Bucket, key: str, data: bytes, put_id: str, condition: Condition) -> None:
    checksum = _checksum(data)
    bucket.call(
        "write",
        key,
        lambda s3: s3.put_object(
            Bucket=bucket.name,
            Key=key,
            Body=data,
            ChecksumAlgorithm="SHA256",
            ChecksumSHA256=checksum,
            Metadata={PUT_ID: put_id},
            **condition,
        ),
    )


def _put_parts(bucket: S3Bucket, key: str, data: bytes, put_id: str, condition: Condition) -> None:
    view = memoryview(data)

    def put_part(number: int) -> CompletedPartTypeDef:
        body = bytes(view[(number - 1) * PART_BYTES : number * PART_BYTES])
        checksum = _checksum(body)
        part = bucket.call(
            "write",
            key,
            lambda s3: s3.upload_part(
                Bucket=bucket.name,
                Key=key,
                UploadId=upload_id,
                PartNumber=number,
                Body=body,
                ChecksumAlgorithm="SHA256",
                ChecksumSHA256=checksum,
            ),
        )
        return {"PartNumber": number, "ETag": part["ETag"], "ChecksumSHA256": checksum}

    with _begun(bucket, key, put_id) as upload_id:
        with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
            parts = list(pool.map(put_part, range(1, -(-len(data) // PART_BYTES) + 1)))
        try:
            bucket.call(
                "write",
                key,
                lambda s3: s3.complete_multipart_upload(
                    Bucket=bucket.name,
                    Key=key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": parts},
                    **condition,
                ),
            )
        except UploadGone:
            # The first try of completing it went through, and its answer was lost.
            if not is_mine(bucket, key, put_id):
                raise


@contextmanager
def _begun(bucket: S3Bucket, key: str, put_id: str) -> Iterator[str]:
    """The id of a multipart upload, which is aborted where the block does not end well."""
    created = bucket.call(
        "write",
        key,
        lambda s3: s3.create_multipart_upload(
            Bucket=bucket.name, Key=key, ChecksumAlgorithm="SHA256", Metadata={PUT_ID: put_id}
        ),
    )
    upload_id = created["UploadId"]
    try:
        yield upload_id
    except BaseException as error:
        try:
            bucket.call(
                "abort the upload of",
                key,
                lambda s3: s3.abort_multipart_upload(Bucket=bucket.name, Key=key, UploadId=upload_id),
            )
        except UploadGone:
            pass
        except JobError as failure:
            error.add_note(
                f"{failure}; its parts cost storage until the bucket's rules abort upload {upload_id}"
            )
        raise


def _checksum(data: bytes) -> str:
    return base64.b64encode(sha256(data).digest()).decode("ascii")
