"""What was asked, kept beside the output: a rerun goes on only with the same job.

`_job.json` holds what decides the results, and the whole config to read. Parallelism, engine memory, the
draft, prices and tags may change between runs, so they are not compared. `_fingerprint.json` holds the
digest of what the first engine computed with; the engines of every later run must have the same.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from pipelines.config import BatchConfig
from pipelines.errors import JobError, JobRefused, NotFound
from pipelines.inputs import Input
from pipelines.rows import Kind
from pipelines.storage import Store

JOB_KEY = "_job.json"
FINGERPRINT_KEY = "_fingerprint.json"
MANIFEST_KEY = "_manifest.json"
VERSION = 2
_READABLE = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
DECIDING_ENGINE = ("model", "dtype", "max_model_len", "default_max_tokens")
"""Settings of an engine that decide its answers; what else does is in its fingerprint."""


def identity(config: BatchConfig, source: Input) -> dict[str, Any]:
    """What decides the results of a job and the names of its parts."""
    engine = config.engine.model_dump(mode="json")
    asked = {
        "version": VERSION,
        "engine": {name: engine[name] for name in DECIDING_ENGINE},
        "sampling": config.sampling.model_dump(mode="json"),
        "seed": config.seed,
        "limit": config.limit,
        "shard": config.shard.model_dump(mode="json"),
        "format": config.format,
        "output_token_ids": config.output_token_ids,
        "input": {file.key: {"size_bytes": file.size_bytes, "etag": file.etag} for file in source.files},
    }
    # As it will be read back, for the comparison: JSON knows neither tuples nor numbers as keys.
    found: dict[str, Any] = orjson.loads(orjson.dumps(asked, option=orjson.OPT_NON_STR_KEYS))
    return found


def begin(
    store: Store, config: BatchConfig, asked: Mapping[str, Any], carried: Mapping[str, Kind]
) -> dict[str, Kind]:
    """Claim the output for this job, or see that it is this job's; the types of the carried columns.

    An output without any part is nobody's yet: the first try may have named a model that is not there.
    Raises `JobRefused` where the output cannot be written or holds another job.
    """
    record = {
        "identity": asked,
        "carried": carried,
        "config": config.model_dump(mode="json"),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    data = orjson.dumps(record, option=_READABLE)
    try:
        if store.put_if_absent(JOB_KEY, data):
            return dict(carried)
        if not any(store.exists(key) for key in (FINGERPRINT_KEY, MANIFEST_KEY)):
            store.put(JOB_KEY, data)
            return dict(carried)
    except JobError as error:
        raise JobRefused(f"output {store.uri} cannot be written: {error}") from error
    kinds: dict[str, Kind] = check_identity(store, asked)["carried"]
    return kinds


def read_job(store: Store) -> dict[str, Any] | None:
    """What `_job.json` holds; None where the output is nobody's yet."""
    try:
        found: dict[str, Any] = orjson.loads(store.get(JOB_KEY))
    except NotFound:
        return None
    return found


def check_identity(store: Store, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `_job.json` holds. Raises `JobRefused` where it is of another job."""
    found: dict[str, Any] = orjson.loads(store.get(JOB_KEY))
    if difference := next(_differences(found["identity"], asked), None):
        place, before, now = difference
        raise JobRefused(
            f"output {store.uri} was begun with {place} = {_shown(before)}, this job has {_shown(now)}; "
            "ask for the same again or choose another output"
        )
    return found


def check_same_store(store: Store) -> None:
    """See that this machine looks at the output that the driver began. Raises `JobRefused`."""
    if not store.exists(JOB_KEY):
        raise JobRefused(
            f"output {store.uri} is not there on node {socket.gethostname()}: a path must be on a disk that "
            "all nodes share; mount one, or give an object store's URI"
        )


def check_fingerprint(store: Store, fingerprint: str) -> None:
    """Leave the engine's fingerprint, or see that it is the one of the rows already written.

    Raises `JobRefused` where it is another one.
    """
    if store.put_if_absent(FINGERPRINT_KEY, orjson.dumps({"fingerprint": fingerprint})):
        return
    found = read_fingerprint(store)
    if found != fingerprint:
        raise JobRefused(
            f"output {store.uri} was begun by an engine with fingerprint {found}, this one has {fingerprint} "
            "(weights, precision, device and versions make it); choose another output"
        )


def read_fingerprint(store: Store) -> str | None:
    """The fingerprint of the engines that wrote the output; None before the first one."""
    if not store.exists(FINGERPRINT_KEY):
        return None
    fingerprint: str = orjson.loads(store.get(FINGERPRINT_KEY))["fingerprint"]
    return fingerprint


def _differences(before: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in [*before, *(name for name in now if name not in before)]:
            yield from _differences(before.get(name), now.get(name), f"{place}.{name}" if place else name)
    elif before != now:
        yield place, before, now


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
