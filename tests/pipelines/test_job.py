"""A rerun goes on only with the same job and the same engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import BatchConfig
from pipelines.errors import JobRefused
from pipelines.inputs import find_input
from pipelines.job import begin, check_fingerprint, identity
from pipelines.storage import LocalStore


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n')
    return file


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


def start(store: LocalStore, prompts: Path, kinds: dict | None = None, **settings) -> dict:
    config = BatchConfig(input=str(prompts), output=store.uri, **settings)
    return begin(store, config, identity(config, find_input(str(prompts))), kinds or {})


def test_the_same_job_goes_on_with_the_types_it_began_with(store: LocalStore, prompts: Path):
    start(store, prompts, {"shop": "int64"})
    check_fingerprint(store, "f")
    assert start(store, prompts, {"shop": "string"}) == {"shop": "int64"}


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": {"draft": "none", "block_length": 4, "max_num_seqs": 2, "threads": 1}},
        {"actors": {"max": 3, "shards_in_flight": 1}},
        {"prices": {"path": "other.yaml"}},
        {"tags": {"team": "x"}},
    ],
)
def test_what_does_not_decide_results_may_change(store: LocalStore, prompts: Path, settings: dict):
    start(store, prompts)
    check_fingerprint(store, "f")
    start(store, prompts, **settings)


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"engine": {"model": "m"}}, 'engine.model = "smollm2-135m", this job has "m"'),
        ({"engine": {"dtype": "float32"}}, 'engine.dtype = "bfloat16", this job has "float32"'),
        ({"sampling": {"temperature": 1.0}}, "sampling.temperature = 0.0, this job has 1.0"),
        ({"sampling": {"logit_bias": {3: 1.0}}}, "sampling.logit_bias.3 = null, this job has 1.0"),
        ({"seed": 4}, "seed = 0, this job has 4"),
        ({"limit": 4}, "limit = null, this job has 4"),
        ({"shard": {"rows": 4}}, "shard.rows = 256, this job has 4"),
        ({"format": "jsonl"}, 'format = "parquet", this job has "jsonl"'),
    ],
)
def test_another_job_is_refused_and_the_difference_named(
    store: LocalStore, prompts: Path, settings: dict, difference: str
):
    start(store, prompts)
    check_fingerprint(store, "f")
    with pytest.raises(JobRefused) as caught:
        start(store, prompts, **settings)
    assert difference in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_input_is_refused(store: LocalStore, prompts: Path):
    start(store, prompts)
    check_fingerprint(store, "f")
    prompts.write_text('{"prompt": "b"}\n')
    with pytest.raises(JobRefused, match=r"input\.in\.jsonl\.etag"):
        start(store, prompts)


def test_an_output_that_no_engine_has_seen_may_be_asked_anew(store: LocalStore, prompts: Path):
    start(store, prompts, engine={"model": "mistyped"})
    start(store, prompts)
    check_fingerprint(store, "f")
    with pytest.raises(JobRefused):
        start(store, prompts, engine={"model": "mistyped"})


def test_another_engine_is_refused(store: LocalStore):
    check_fingerprint(store, "one")
    check_fingerprint(store, "one")
    with pytest.raises(JobRefused, match="was begun by an engine with fingerprint one, this one has two"):
        check_fingerprint(store, "two")


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, prompts: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JobRefused, match=r"output .*file/out cannot be written"):
        start(LocalStore(tmp_path / "file" / "out"), prompts)
