"""A batch's job as it is run outside of tests: the real pipeline in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError
from pipelines.config import BatchConfig, load_config
from pipelines.lease_object import LeaseRecord, read_lease, swap_lease
from pipelines.processes import ProcessMark
from pipelines.service.batch_submitter import MODULE, JobAsked, ProcessSubmitter, environment
from pipelines.service.batches_config import BatchesConfig
from pipelines.service.openai_completions import DEFAULT_MAX_TOKENS
from pipelines.storage import open_store
from tests.pipelines.helpers import jsonl
from tests.pipelines.service.batch_world import (
    CHAT,
    TEXT,
    batch_world,
    chat_line,
    check_answers,
    lines_of,
    submit,
)

ROOT = Path(__file__).resolve().parents[3]
PRICES = ROOT / "configs/prices.yaml"


def job_file(folder: Path, engine: str, rows: int = 2) -> Path:
    path = folder / "job.yaml"
    path.write_text(
        f"engine: {engine}\nshard: {{rows: {rows}}}\nactors: {{max: 1, shards_in_flight: 1}}\n"
        f"prices: {{path: {PRICES}}}\nsampling: {{top_p: 0.5}}\n"
    )
    return path


def test_a_job_has_the_settings_of_its_file_the_defaults_of_the_api_and_the_batchs_places(tmp_path):
    path = job_file(tmp_path, "{model: fake}")
    settings = BatchesConfig(root="r", job=path, settings=("shard.rows=7", "tags.team=night"))
    submitter = ProcessSubmitter(settings, temperature=0.25, max_tokens=11)
    config = submitter.config(JobAsked("b", CHAT, "in", "out"))
    assert (config.input, config.output, config.format) == ("in", "out", "openai")
    assert (config.sampling.temperature, config.sampling.max_tokens, config.sampling.top_p) == (0.25, 11, 0.5)
    assert (config.shard.rows, config.actors.max, config.tags) == (7, 1, {"team": "night"})
    text = submitter.config(JobAsked("b", TEXT, "in", "out"))
    assert (text.sampling.max_tokens, text.sampling.temperature) == (DEFAULT_MAX_TOKENS, 0.25)
    # A row tells what the job was given from what it was not, also behind the pipe.
    sent = BatchConfig.model_validate_json(submitter.message(JobAsked("b", CHAT, "in", "out")))
    assert sent == config
    assert sent.sampling.model_fields_set == config.sampling.model_fields_set


@pytest.mark.parametrize(
    ("text", "said"),
    [("engine: {colour: red}", "colour"), ("- 1", "not a mapping"), (None, "cannot be read")],
)
def test_a_bad_job_file_is_told_before_anything_is_served(tmp_path, text, said):
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        ProcessSubmitter(BatchesConfig(root="r", job=path), temperature=1.0, max_tokens=None)


@pytest.mark.parametrize("way", ["the service is no more", "it is told to"])
def test_the_process_ends_when(tmp_path, way):
    (tmp_path / "in.jsonl").write_bytes(jsonl([chat_line("a", "hi")]))
    config = load_config(
        str(job_file(tmp_path, "{model: fake}")),
        ["lease_s=600"],
        input=str(tmp_path / "in.jsonl"),
        output=str(tmp_path / "out"),
    )
    # It waits for a driver of another machine that may still live.
    elsewhere = LeaseRecord(
        owner="other", epoch=1, duration_s=600, host="elsewhere", process=ProcessMark("other", 1, "1")
    )
    swap_lease(open_store(config.output), elsewhere, None)
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write(config.model_dump_json(exclude_unset=True).encode() + b"\n")
    process.stdin.flush()
    assert b"takes over when nothing is heard" in process.stderr.readline()
    if way == "it is told to":
        process.terminate()
    else:
        process.stdin.close()
    assert process.wait(timeout=60) == 143
    for pipe in (process.stdin, process.stderr):
        pipe.close()


def test_a_job_of_a_replica_joins_its_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "RAY_ADDRESS" not in environment()
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    inside = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", inside)
    assert environment()["RAY_ADDRESS"] == "10.0.0.1:6379"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_the_real_pipeline_is_ended_with_its_service_and_goes_on_with_the_next(tmp_path):
    lines = [chat_line(f"c{number}", f"question {number}", ignore_eos=True) for number in range(24)]
    settings = {"job": job_file(tmp_path, "{model: 'fake:0.03', max_num_seqs: 2}"), "poll_s": 0.2}
    with batch_world(tmp_path / "root", **settings) as here, here.client() as api:
        made = submit(api, lines)
        with here.changed:
            assert here.changed.wait_for(
                lambda: api.batches.retrieve(made.id).request_counts.completed > 0, timeout=250
            )
        output = open_store(here.batches.batches.output_uri(here.batches.batches.open_batches()[0]))
    lease = read_lease(output)[0]
    assert lease.released and lease.process.is_gone()
    before = sorted(output.keys("data/"))
    assert 0 < len(before) < 12
    written = {key: output.get(key) for key in before}
    with batch_world(tmp_path / "root", **settings) as here, here.client() as api:
        kept = {}

        def look() -> bool:
            kept.update({key: output.get(key) for key in before if output.exists(key)})
            return api.batches.retrieve(made.id).status in ("finalizing", "completed")

        with here.changed:
            assert here.changed.wait_for(look, timeout=250)
        done = here.until(api, made.id, "completed", "failed", timeout_s=250)
        assert kept == written
        assert done.request_counts.completed == 24
        answers = lines_of(api, done.output_file_id)
        assert sorted(line["custom_id"] for line in answers) == sorted(line["custom_id"] for line in lines)
        assert {line["response"]["body"]["usage"]["completion_tokens"] for line in answers} == {9}
        assert done.usage.model_extra["cost_usd"] > 0


@pytest.mark.ray
@pytest.mark.slow
def test_the_embedded_model_answers_a_batch_as_it_answers_a_chat(tmp_path):
    text = "{model: smollm2-135m, device: cpu, max_model_len: 512}"
    engine = EngineConfig(model="smollm2-135m", device="cpu", max_model_len=512)
    names = ["a jacket", "two shoes", "the blue hat"]
    lines = [
        chat_line(name, f"How do I return {name}?", model="smollm2-135m", max_tokens=24) for name in names
    ]
    settings = {"job": job_file(tmp_path, text, rows=8), "poll_s": 0.2, "engine": engine}
    with batch_world(tmp_path / "root", **settings) as here, here.client() as api:
        done = here.until(api, submit(api, lines).id, "completed", "failed", timeout_s=280)
        assert done.status == "completed", done
        check_answers(api, done, lines)
