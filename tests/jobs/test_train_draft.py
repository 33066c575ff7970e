"""The job: from the command line to a line of JSON, for each of its modes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dflash_engine.training.config import load_train_config
from dflash_engine.training.corpus import load_corpus
from jobs import train_draft
from tests.dflash_engine.training.tiny_run import config_for, target_folder, write_data

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file of a tiny run."""
    folder = tmp_path_factory.mktemp("job")
    target = target_folder(folder)
    values = config_for(target, write_data(target, folder / "data", 60), folder / "out")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(json.loads(values.model_dump_json())))
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict, str]:
    assert train_draft.main(list(argv)) == 0
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def test_the_same_command_goes_on_where_the_last_one_ended(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ("--config", str(config), "--output", str(tmp_path), "--set", "budget.steps=12")
    stopped, _ = run(capsys, *command, "--stop_after_s", "0")
    assert not stopped["finished"] and stopped["step"] == 1
    finished, shown = run(capsys, *command, "--profile")
    assert finished["finished"] and finished["steps"] == 12 and "held out at step 12" in shown
    assert json.loads((tmp_path / "summary.json").read_text()) == finished
    assert (tmp_path / "draft" / "model.safetensors").stat().st_size == finished["weight_bytes"]


def test_generated_responses_are_the_training_data_and_are_not_made_twice(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "responses"
    rows = [{"messages": [{"role": "user", "content": f"Where is order {i}?"}]} for i in range(5)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "prompts": prompts,
        "output": output,
        "shard_prompts": 5,
        "max_tokens": 6,
        "engine": "{device: cpu, dtype: float32, max_model_len: 128, threads: 1}",
    }
    changes = [part for key, value in settings.items() for part in ("--set", f"generate.{key}={value}")]
    summary, _ = run(capsys, "--config", str(config), "--generate", *changes)
    corpus = load_corpus([str(output)])
    assert len(corpus) == 5 and summary["shards_left"] == 0
    assert summary["response_tokens"] == corpus.response_tokens
    again, _ = run(capsys, "--config", str(config), "--generate", *changes)
    assert again["response_tokens"] == 0 and again["shards_left"] == 0
    other = [*changes, "--set", "generate.max_tokens=7"]
    assert train_draft.main(["--config", str(config), "--generate", *other]) == 2
    assert "another request" in capsys.readouterr().err


def test_an_estimate_comes_from_measured_times(config: Path, capsys: pytest.CaptureFixture[str]):
    summary, _ = run(capsys, "--config", str(config), "--estimate", "--price_per_gpu_hour", "4")
    assert summary["gpu_hours"] == pytest.approx(summary["steps"] * summary["step_s"] / 3600)
    assert summary["cost"] == pytest.approx(4 * summary["gpu_hours"])
    assert summary["feature_tokens_per_s"] > 0


@pytest.mark.parametrize("name", ["smollm2", "qwen3-8b"])
def test_configs_that_are_shipped_can_be_read(name: str):
    assert load_train_config(ROOT / "configs" / "train" / f"{name}.yaml").data.paths


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("draft.layer=3", "draft.layer"),
        ("budget.seconds=5", "steps or seconds"),
        ("budget", "dotted.key=value"),
        ("draft.mask_token_id=99999", "vocabulary"),
        ("data.paths=[nowhere]", "nowhere"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    config: Path, change: str, message: str, capsys: pytest.CaptureFixture[str]
):
    assert train_draft.main(["--config", str(config), "--set", change]) == 2
    assert message in capsys.readouterr().err
