"""Requests to one bucket: a client made where it is used, retries with back-off, errors of ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import boto3
from botocore import UNSIGNED
from botocore.config import Config

from pipelines.errors import JobRefused
from pipelines.s3_errors import FOREIGN, is_transient, translated
from pipelines.storage_config import StorageConfig

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

Result = TypeVar("Result")

CONNECT_TIMEOUT_S = 10.0
# As many as look at the files of an input side by side, and as many again.
CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class S3Bucket:
    """One bucket and how to reach it; may be used by several threads and sent to other processes."""

    name: str
    settings: StorageConfig

    def uri(self, key: str) -> str:
        return f"s3://{self.name}/{key}" if key else f"s3://{self.name}"

    def call(self, act: str, key: str, request: Callable[[S3Client], Result]) -> Result:
        """The result of a request that may be sent several times.

        Raises `JobError` that says what could not be done with which object.
        """
        pauses = self.settings.pauses()
        while True:
            try:
                return request(_client(self.settings))
            except FOREIGN as error:
                pause = next(pauses, None) if is_transient(error) else None
                if pause is None:
                    raise translated(error, act, self.uri(key), self.settings.endpoint_url) from error
            time.sleep(pause)


# A client takes a tenth of a second to make, and stores come to a process again and again, with each of Ray's
# tasks. One for all who ask alike keeps the connections too; clients may be shared by threads.
@lru_cache(maxsize=8)
def _client(settings: StorageConfig) -> S3Client:
    addressing = settings.addressing
    if addressing == "auto" and settings.endpoint_url is not None:
        # Few stores of one's own have a host name for each bucket.
        addressing = "path"
    config = Config(
        connect_timeout=min(CONNECT_TIMEOUT_S, settings.timeout_s),
        read_timeout=settings.timeout_s,
        max_pool_connections=CONNECTIONS,
        # One loop retries requests and bodies alike; botocore's has a quota that an outage of seconds
        # uses up where many threads ask.
        retries={"total_max_attempts": 1, "mode": "standard"},
        s3={"addressing_style": addressing},
        signature_version=UNSIGNED if settings.anonymous else "s3v4",
        tcp_keepalive=True,
        # Puts bring their own checksum, and whole reads ask for one; ranges have none.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    # Making a session is not safe among threads where it is boto3's default one; this one is our own.
    session = boto3.Session(profile_name=settings.profile, region_name=settings.region)
    # With an endpoint of one's own, any region will do for the signature.
    region = session.region_name or ("us-east-1" if settings.endpoint_url else None)
    try:
        return session.client("s3", region_name=region, endpoint_url=settings.endpoint_url, config=config)
    except ValueError as error:
        raise JobRefused(f"storage.endpoint_url is no address of a server: {error}") from error
