"""The script as people run it: in a copy of the tree, on a cluster of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.pipelines.helpers import error_records, jsonl, output_rows, prompts

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
input: in.jsonl
output: out
engine: {model: fake, max_model_len: 30, default_max_tokens: 12}
shard: {rows: 5}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `--working-dir .` would ship: code and configs, nothing installed."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("jobs", "pipelines", "dflash_engine", "kernels", "configs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    return copy


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(CONFIG)
    return tmp_path


def command(tree: Path, work: Path, *arguments: str) -> dict[str, Any]:
    """Arguments for a process that runs the job on files of `work`."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    settings = [
        "--config",
        str(work / "job.yaml"),
        "--input",
        str(work / "in.jsonl"),
        "--output",
        str(work / "out"),
    ]
    return {
        "args": [sys.executable, "jobs/batch_generate.py", *settings, *arguments],
        "cwd": tree,
        "env": {**environment, "PYTHONPATH": str(tree)},
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }


def run(tree: Path, work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(tree, work, *arguments), check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    summary: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return summary


USER = [{"role": "user", "content": "hi there"}]
PARTS = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
LONG = " ".join(["word"] * 40)
# Lines as they stand in the file, and what becomes of each: None for a blank one, "" for an answer, else
# the code of the error row and a part of its message.
DIRTY: list[tuple[bytes, str | None, str]] = [
    (b'\xef\xbb\xbf{"prompt": "after a BOM"}', "", ""),
    (b"", None, ""),
    (b'{"prompt": "before a carriage return"}\r', "", ""),
    (b"\r", None, ""),
    ('{"prompt": "a\u2028b"}'.encode(), "", ""),
    (orjson.dumps({"messages": [{"role": "user", "content": PARTS}]}), "", ""),
    (b'{"prompt": "hi", "custom_id": 7}', "", ""),
    (b'{"prompt": "ho", "custom_id": "7"}', "", ""),
    (b"not JSON", "invalid_json", "not JSON: "),
    (b'{"prompt": NaN}', "invalid_json", "not JSON: "),
    (b'{"prompt": "\xff"}', "invalid_utf8", "not UTF-8: byte 0xff at position 12"),
    (b'["prompt"]', "invalid_row", "the row is a list, not an object"),
    (b'{"custom_id": "none"}', "invalid_prompt", "no prompt"),
    (b'{"prompt": 3}', "invalid_prompt", "prompt is a number, not text"),
    (b'{"prompt": "hi", "temperature": -1}', "invalid_sampling", "temperature"),
    (b'{"prompt": "hi", "max_tokens": "ten"}', "invalid_sampling", "max_tokens"),
    (b'{"messages": [{"role": "robot", "content": "hi"}]}', "invalid_prompt", "role 'robot'"),
    (
        orjson.dumps({"custom_id": "url", "method": "POST", "url": "/v1/images", "body": {"messages": USER}}),
        "unknown_url",
        "url '/v1/images'",
    ),
    (orjson.dumps({"prompt": LONG}), "context_length_exceeded", "41 tokens"),
    (
        orjson.dumps(
            {"custom_id": "ok", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": USER}}
        ),
        "",
        "",
    ),
]


def test_dirty_input_gives_answers_to_good_rows_and_reasons_for_bad_ones(tree: Path, work: Path):
    (work / "in.jsonl").write_bytes(b"\n".join(line for line, _, _ in DIRTY))
    offsets = [sum(len(line) + 1 for line, _, _ in DIRTY[:number]) for number in range(len(DIRTY))]
    placed = [(offset, *item) for offset, item in zip(offsets, DIRTY, strict=True)]
    done = run(tree, work)
    assert done.returncode == 0, done.stderr
    rows = {row["row_id"]: row for row in output_rows(work / "out")}
    wanted = {f"in.jsonl:{offset}": code for offset, _, code, _ in placed if code is not None}
    assert {row_id: row["error_type"] or "" for row_id, row in rows.items()} == wanted
    records = {record["offset"]: record for record in error_records(work / "out")}
    bad = [(offset, line, code, reason) for offset, line, code, reason in placed if code]
    assert sorted(records) == [offset for offset, *_ in bad]
    for offset, line, code, reason in bad:
        record = records[offset]
        assert (record["file"], record["error_type"]) == ("in.jsonl", code)
        assert reason in record["error_message"]
        assert record.get("raw", "").encode() == line or code == "invalid_utf8"
    summary = last_line(done)
    assert (summary["rows_ok"], summary["rows_error"], summary["duplicate_custom_ids"]) == (7, 11, 1)
    assert "Traceback" not in done.stderr + done.stdout
    # The rerun of a complete job prints the same and starts nothing.
    again = run(tree, work)
    assert (again.returncode, last_line(again)) == (0, summary)


def test_a_job_of_bad_rows_alone_ends_with_exit_code_1(tree: Path, work: Path):
    (work / "in.jsonl").write_bytes(b"no\nrow\nis good\n")
    done = run(tree, work)
    assert done.returncode == 1
    assert (last_line(done)["rows_ok"], last_line(done)["rows_error"]) == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--input", "nowhere.jsonl"], "input nowhere.jsonl does not exist"),
        (["--input", "ftp://host/in.jsonl"], "scheme ftp:// is not supported"),
        (["--output", "Makefile/out"], "Makefile/out/_job.json: Not a directory"),
        (["--config", "nowhere.yaml"], "config nowhere.yaml cannot be read"),
        (["--set", "engine.modle=fake"], "engine: engine settings: modle: unknown setting"),
        (["--set", "colour=red"], "unknown setting colour"),
        (["--set", "engine.model=./nowhere"], "model ./nowhere: there is no such folder"),
        (["--set", "prices.path=nowhere.yaml"], "prices nowhere.yaml cannot be read"),
        (["--limit", "0"], "limit: Input should be greater than or equal to 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_job_that_cannot_start_ends_with_one_sentence_and_exit_code_2(
    tree: Path, work: Path, arguments: list[str], sentence: str
):
    (work / "in.jsonl").write_bytes(jsonl(prompts(2)))
    (tree / "Makefile").write_bytes(b"a file in the way")
    done = run(tree, work, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("batch_generate: ")
    assert sentence in line
    assert not (work / "out").exists()


def parts_of(work: Path) -> dict[str, int]:
    """Names of the parts, and when each was written."""
    found = (work / "out" / "data").glob("part-*")
    return {path.name: path.stat().st_mtime_ns for path in found}


@pytest.fixture
def process(tree: Path, work: Path) -> Iterator[subprocess.Popen[str]]:
    (work / "in.jsonl").write_bytes(jsonl(prompts(100)))
    # 100 rows of up to 12 tokens, 16 at once: some seconds, so that there is a middle to be killed in.
    settings = [
        "--set",
        "engine.model=fake:0.1",
        "--set",
        "sampling.temperature=1",
        "--set",
        "actors.shards_in_flight=2",
    ]
    started = subprocess.Popen(**command(tree, work, *settings))
    yield started
    started.kill()
    started.communicate()


def test_kill_9_in_the_middle_and_the_same_command_again(
    tree: Path, work: Path, tmp_path_factory: pytest.TempPathFactory, process: subprocess.Popen[str]
):
    while not parts_of(work):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)  # there is no event to wait for: the first part is a file of another process
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = parts_of(work)
    assert not (work / "out" / "_manifest.json").exists()
    assert 0 < len(before) < 15

    again = subprocess.run(**{**command(tree, work), "args": process.args}, check=False)
    assert again.returncode == 0, again.stderr
    after = parts_of(work)
    assert {name: after[name] for name in before} == before

    undisturbed = tmp_path_factory.mktemp("undisturbed")
    shutil.copy(work / "in.jsonl", undisturbed / "in.jsonl")
    shutil.copy(work / "job.yaml", undisturbed / "job.yaml")
    whole = run(tree, undisturbed, "--set", "sampling.temperature=1")
    assert whole.returncode == 0, whole.stderr

    def answers(folder: Path) -> dict[str, tuple[Any, ...]]:
        kept = ("custom_id", "text", "finish_reason", "completion_tokens", "status")
        return {row["row_id"]: tuple(row[name] for name in kept) for row in output_rows(folder / "out")}

    assert len(output_rows(work / "out")) == len(answers(work)) == 100
    assert answers(work) == answers(undisturbed)
    assert last_line(again)["rows_ok"] == last_line(whole)["rows_ok"] == 100
    assert last_line(again)["completion_tokens"] == last_line(whole)["completion_tokens"]


def test_a_budget_stops_a_job_a_higher_one_goes_on_and_repaired_lines_fill_the_gaps(tree: Path, work: Path):
    lines = jsonl(prompts(60)).splitlines(keepends=True)
    lines[20] = b'{"prompt": 20, "custom_id": "c20"}\n'
    (work / "in.jsonl").write_bytes(b"".join(lines))
    stopped = run(tree, work, "--set", "budget_usd=0.0000001", "--set", "actors.shards_in_flight=1")
    assert stopped.returncode == 3, stopped.stderr
    # Ray may print there that it ended the actors; the job itself has nothing to say for programs.
    assert not any(line.startswith("{") for line in stopped.stdout.splitlines())
    assert "budget_usd = 0.0000001 is reached" in stopped.stderr
    assert "the same command with a higher budget_usd goes on" in stopped.stderr
    before = parts_of(work)
    assert 0 < len(before) < 12
    done = run(tree, work, "--set", "budget_usd=10")
    assert done.returncode == 0, done.stderr
    assert (last_line(done)["rows_ok"], last_line(done)["rows_error"]) == (59, 1)
    assert parts_of(work).items() >= before.items()
    kept = {row["row_id"]: row for row in output_rows(work / "out")}

    (record,) = error_records(work / "out")
    (work / "fixed.jsonl").write_bytes(jsonl([{**record, "raw": {"prompt": "twenty", "custom_id": "c20"}}]))
    repaired = run(tree, work, "--input", str(work / "fixed.jsonl"))
    assert repaired.returncode == 0, repaired.stderr
    assert (last_line(repaired)["rows_ok"], last_line(repaired)["rows_error"]) == (60, 0)
    rows = output_rows(work / "out")
    assert [row["row_id"] for row in rows if row != kept[row["row_id"]]] == [record["row_id"]]
    assert len(rows) == 60
    assert error_records(work / "out") == []
    # And the first command finds its job complete.
    assert last_line(run(tree, work))["rows_ok"] == 60
