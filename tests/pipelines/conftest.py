"""A bucket of a real S3 server, for whoever tests with object storage."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import boto3
import pytest

from tests.pipelines.s3_server import S3, fault_proxy, moto_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A bucket of its own, a proxy in front of it that can be told to fail, and credentials to reach it."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    direct = boto3.client("s3", endpoint_url=s3_server, region_name="us-east-1")
    bucket = f"test-{uuid.uuid4().hex}"
    direct.create_bucket(Bucket=bucket)
    with fault_proxy(s3_server) as proxy:
        yield S3(bucket, proxy, direct)
    direct.close()
