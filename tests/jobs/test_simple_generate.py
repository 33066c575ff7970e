"""The job on tiny random models: what it prints, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import simple_generate
from tests.helpers import tiny_draft_folder, tiny_model_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return tiny_draft_folder(tmp_path_factory.mktemp("drafts"), model)


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[str, dict]:
    """What was streamed, and the JSON line."""
    assert simple_generate.main([str(arg) for arg in argv]) == 0
    *printed, summary = capsys.readouterr().out.removesuffix("\n").split("\n")
    return "\n".join(printed), json.loads(summary)


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "3"]], ids=["greedy", "seeded"])
def test_with_and_without_a_draft_the_text_is_the_same(capsys, model, draft, sampling):
    asked = ["--model_path", model, "--prompt", "Where is my order?", "--max_tokens", 24, *sampling]
    _, plain = answer(capsys, *asked)
    _, drafted = answer(capsys, *asked, "--use_dflash", "--draft", draft)
    assert plain["completion_tokens"] > 0
    assert plain["steps"] >= drafted["steps"] > 0
    for same in ("text", "finish_reason", "prompt_tokens", "completion_tokens", "fingerprint"):
        assert plain[same] == drafted[same]


def test_what_is_streamed_is_the_text_and_then_the_figures(capsys, model):
    printed, summary = answer(capsys, "--model_path", model, "--prompt", "Hello", "--max_tokens", 8)
    text, figures = printed.rsplit("\n\n", 1)
    assert text == summary["text"]
    assert f"{summary['tokens_per_s']} tokens/s, acceptance length 1.00" in figures
    # Seconds are told to a thousandth.
    tokens, elapsed_s = summary["completion_tokens"], summary["elapsed_s"]
    assert tokens / (elapsed_s + 0.0006) <= summary["tokens_per_s"] <= tokens / (elapsed_s - 0.0006)


def test_set_reaches_engine_and_sampling(capsys, model):
    asked = ["--model_path", model, "--prompt", "Hello", "--set", "engine.max_model_len=64"]
    _, summary = answer(capsys, *asked, "--set", "sampling.max_tokens=5", "--set", "sampling.ignore_eos=true")
    assert summary["completion_tokens"] == 5
    assert simple_generate.main([str(arg) for arg in asked[:-1]] + ["engine.max_model_len=2"]) == 2
    assert "2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--model_path", "/nowhere/model"], "/nowhere/model"),
        (["--set", "engine.blok_length=4"], "blok_length"),
        (["--set", "sampling.top_p=2"], "top_p"),
        (["--max_tokens", "0"], "max_tokens"),
        (["--use_dflash", "--draft", "/nowhere/draft"], "/nowhere/draft"),
        (["--prompt", ""], "prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_work_is_one_sentence_and_exit_code_2(capsys, model, argv, named):
    assert simple_generate.main(["--model_path", str(model), "--prompt", "Hello", *argv]) == 2
    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize("setting", ["temperature=1", "engine.=1", "model.x=1", "sampling.seed"])
def test_a_setting_of_another_form_is_refused(capsys, setting):
    with pytest.raises(SystemExit) as refused:
        simple_generate.main(["--prompt", "Hello", "--set", setting])
    assert refused.value.code == 2
    assert setting in capsys.readouterr().err


def test_the_script_runs_as_a_file():
    command = [
        sys.executable,
        "jobs/simple_generate.py",
        "--prompt",
        "Hello",
        "--model_path",
        "/nowhere/model",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # as Ray sets it for a driver
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
