"""Where endpoint, region and patience come from, and that no secret travels."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from pipelines.storage import open_store
from pipelines.storage_config import LONGEST_PAUSE_S, StorageConfig
from tests.pipelines.s3_server import S3


def test_the_config_is_heard_before_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name in (
        "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    assert StorageConfig().resolved() == StorageConfig()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://general:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "there")
    assert StorageConfig().resolved() == StorageConfig(endpoint_url="http://general:1", region="there")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://special:2")
    monkeypatch.setenv("AWS_REGION", "here")
    assert StorageConfig().resolved() == StorageConfig(endpoint_url="http://special:2", region="here")
    asked = StorageConfig(endpoint_url="https://mine", region="home", profile="me")
    assert asked.resolved() == asked


@pytest.mark.parametrize(
    "wrong", [{"endpoint_url": "host:9000"}, {"secret_key": "x"}, {"max_attempts": 0}, {"timeout_s": 0}]
)
def test_what_cannot_be_is_refused(wrong: dict):
    with pytest.raises(ValidationError):
        StorageConfig(**wrong)


def test_pauses_grow_to_a_limit_and_are_one_less_than_the_tries():
    pauses = list(StorageConfig(max_attempts=12, backoff_s=0.2).pauses())
    assert len(pauses) == 11
    assert all(0.1 * 2**n <= pause <= 0.2 * 2**n for n, pause in enumerate(pauses[:6]))
    assert LONGEST_PAUSE_S / 2 <= pauses[-1] <= LONGEST_PAUSE_S
    assert list(StorageConfig(max_attempts=1).pauses()) == []


def test_a_store_takes_the_endpoint_along_but_no_secret(s3: S3, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.proxy.endpoint)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "plain-words")
    store = open_store(f"s3://{s3.bucket}/root")
    store.put("key", b"data")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    sent = pickle.dumps(store)
    assert b"plain-words" not in sent
    assert pickle.loads(sent).get("key") == b"data"
    assert len(s3.proxy.sent("GET")) == 1
