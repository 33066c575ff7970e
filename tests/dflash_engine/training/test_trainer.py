"""A whole run on a tiny target: it learns, goes on after a kill, and says what is wrong before it begins."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_engine import DFlashEngine, Request, SamplingParams
from dflash_engine.errors import ConfigError
from dflash_engine.training.checks import TrainingCheckFailed
from dflash_engine.training.config import TrainConfig
from dflash_engine.training.corpus import load_corpus, split_held_out
from dflash_engine.training.trainer import Options, train
from tests.dflash_engine.training.tiny_run import ROW_TOKENS, config_for, target_folder, write_data

CHANCE = 1 + 1 / 320


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(target, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Any]:
    config = config_for(target, data, tmp_path_factory.mktemp("trained"))
    return config, train(config)


def short(config: TrainConfig, output: Path, **sections: Any) -> TrainConfig:
    """The same run with 20 steps, into another folder."""
    run = config.run.model_copy(update={"log_every": 5, "checkpoint_every": 7})
    changes: dict[str, Any] = {
        "output": str(output),
        "budget": {"steps": 20},
        "evaluation": {"every": 20},
        "run": run.model_dump(),
    }
    return TrainConfig(**(config.model_dump() | changes | sections))


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.output) / "draft" / "model.safetensors")


def assert_same_weights(one: TrainConfig, other: TrainConfig) -> None:
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def stop_after(steps: int) -> Options:
    asked = iter([False] * (steps - 1))
    return Options(stop=lambda: next(asked, True))


def test_a_trained_draft_is_accepted_far_more_often_than_chance(trained: tuple[TrainConfig, Any]):
    _, summary = trained
    assert summary["finished"] and summary["acceptance_length"]["held_out"] > 1.3 > CHANCE


def test_the_engine_accepts_as_much_of_the_draft_as_held_out_answers_said(
    trained: tuple[TrainConfig, Any], target: Path
):
    config, summary = trained
    whole = load_corpus(config.data.paths).clipped(ROW_TOKENS)
    _, held_out = split_held_out(whole, config.data.held_out, config.run.seed)
    engine = DFlashEngine(
        str(target),
        f"{config.output}/draft",
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=128,
    )
    prompts = [tuple(held_out.prompt(index).tolist()) for index in range(len(held_out))]
    sampling = SamplingParams(max_tokens=24)
    results = engine.generate([Request(token_ids=prompt, sampling=sampling) for prompt in prompts])
    for index, result in enumerate(results):
        assert list(result.tokens) == held_out.sequence(index)[len(prompts[index]) :].tolist()
    accepted, steps = (
        sum(getattr(result.usage, name) for result in results) for name in ("accepted_tokens", "steps")
    )
    # The exported weights are bfloat16, those that were measured float32: a guess may differ.
    assert (accepted + steps) / steps == pytest.approx(summary["acceptance_length"]["held_out"], rel=0.03)


def test_the_output_is_a_draft_in_the_published_format_with_a_readme(trained: tuple[TrainConfig, Any]):
    config, summary = trained
    folder = Path(config.output) / "draft"
    keys = json.loads((folder / "config.json").read_text())
    assert keys["architectures"] == ["DFlashDraftModel"] and keys["block_size"] == 6
    assert keys["dflash_config"] == {"mask_token_id": 304, "target_layer_ids": [0, 2]}
    assert {tensor.dtype for tensor in weights(config).values()} == {torch.bfloat16}
    page = (folder / "README.md").read_text()
    assert f"| held_out | {summary['acceptance_length']['held_out']:.2f} |" in page
    assert "Apache-2.0" in page and f"{summary['response_tokens']:,} response tokens" in page


def test_a_run_in_pieces_ends_with_the_same_bits(trained: tuple[TrainConfig, Any], tmp_path: Path):
    whole, pieces = (short(trained[0], tmp_path / name) for name in ("whole", "pieces"))
    train(whole)
    for steps in (3, 8):
        assert not train(pieces, stop_after(steps))["finished"]
    assert train(pieces)["finished"]
    assert_same_weights(whole, pieces)


KILLED = """
import json, os, signal, sys
from pathlib import Path
from dflash_engine.training.config import TrainConfig
from dflash_engine.training.trainer import Options, train

def at_step_12(line):
    if line.get("event") == "step" and line["step"] >= 10:
        os.kill(os.getpid(), signal.SIGKILL)

train(TrainConfig(**json.loads(Path(sys.argv[1]).read_text())), Options(report=at_step_12))
"""


def test_a_killed_run_goes_on_to_the_same_bits(trained: tuple[TrainConfig, Any], tmp_path: Path):
    whole, killed = (short(trained[0], tmp_path / name) for name in ("whole", "killed"))
    (tmp_path / "config.json").write_text(killed.model_dump_json())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "config.json")]
    assert subprocess.run(command, capture_output=True).returncode == -9
    state = Path(killed.output) / "state.safetensors"
    assert state.is_file() and not (Path(killed.output) / "draft").exists()
    train(whole)
    train(killed)
    assert_same_weights(whole, killed)


@pytest.mark.parametrize("place", ["disk", "recompute"])
def test_where_features_are_kept_changes_nothing(
    place: str, trained: tuple[TrainConfig, Any], tmp_path: Path
):
    device = short(trained[0], tmp_path / "device")
    other = short(trained[0], tmp_path / place, features={"place": place, "batch_tokens": 512})
    train(device)
    train(other)
    assert_same_weights(device, other)


def test_features_in_windows_are_exchanged_and_survive_a_stop(
    trained: tuple[TrainConfig, Any], tmp_path: Path
):
    sections = {"data": trained[0].data.model_copy(update={"windows": 3, "window_steps": 4}).model_dump()}
    whole, pieces = (short(trained[0], tmp_path / name, **sections) for name in ("whole", "pieces"))
    train(whole)
    train(pieces, stop_after(9))
    train(pieces)
    assert_same_weights(whole, pieces)


def test_a_budget_in_seconds_becomes_steps_that_a_restart_keeps(
    trained: tuple[TrainConfig, Any], tmp_path: Path
):
    config = short(trained[0], tmp_path, budget={"seconds": 100})
    first = train(config, stop_after(2))
    assert first["step"] == 2 < first["steps"] < 100_000
    assert train(config, stop_after(1))["steps"] == first["steps"]


def test_another_loss_is_another_run(trained: tuple[TrainConfig, Any], tmp_path: Path):
    config = short(trained[0], tmp_path)
    train(config, stop_after(2))
    with pytest.raises(ConfigError, match="other settings"):
        train(short(trained[0], tmp_path, loss={"kind": "dpace"}))


@pytest.mark.parametrize("sections", [{"loss": {"kind": "dpace"}}, {"optimizer": {"kind": "muon"}}], ids=str)
def test_other_losses_and_optimizers_learn_too(
    sections: dict[str, Any], trained: tuple[TrainConfig, Any], tmp_path: Path
):
    lines: list[dict[str, Any]] = []
    config = short(trained[0], tmp_path, **sections, budget={"steps": 60})
    train(config, Options(report=lines.append))
    steps = [line for line in lines if line["event"] == "step"]
    assert steps[-1]["acceptance_length"] > steps[0]["acceptance_length"] + 0.3


def test_a_draft_can_be_trained_on(trained: tuple[TrainConfig, Any], tmp_path: Path):
    sizes = trained[0].draft.model_copy(update={"init_from": f"{trained[0].output}/draft"})
    config = short(trained[0], tmp_path, draft=sizes.model_dump(), optimizer={"lr": 1e-6})
    summary = train(config)
    expected = trained[1]["acceptance_length"]["held_out"]
    assert summary["acceptance_length"]["held_out"] == pytest.approx(expected, abs=0.05)


def test_too_few_response_tokens_are_refused(trained: tuple[TrainConfig, Any], tmp_path: Path):
    config = short(trained[0], tmp_path, checks={"min_response_tokens": 10**9})
    with pytest.raises(TrainingCheckFailed, match="too few response tokens"):
        train(config)


def test_another_models_responses_are_refused(data: Path, tmp_path: Path):
    other = target_folder(tmp_path, seed=5)
    with pytest.raises(TrainingCheckFailed, match="responses not the targets"):
        train(config_for(other, data, tmp_path / "out"))


def test_prompt_lengths_off_by_one_in_the_data_are_seen(
    trained: tuple[TrainConfig, Any], data: Path, tmp_path: Path
):
    from dflash_engine.training.corpus import save_corpus

    corpus = load_corpus([str(data)])
    shifted = replace(corpus, tokens=corpus.tokens.copy())
    for index in range(len(corpus)):
        said = shifted.sequence(index)[corpus.prompt_lengths[index] :]
        said[:-1] = said[1:].copy()
    save_corpus(shifted, tmp_path / "data" / "part-0.npz")
    config = short(trained[0], tmp_path / "out", data={"paths": [str(tmp_path / "data")], "row_tokens": 48})
    strict = TrainConfig(
        **(config.model_dump() | {"checks": {"min_response_tokens": 1, "min_own_tokens": 0.97}})
    )
    with pytest.raises(TrainingCheckFailed, match="responses not the targets"):
        train(strict)
