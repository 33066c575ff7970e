"""Acceptance by data set, against the engine's own totals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_engine.acceptance_report import acceptance_report, acceptance_table
from dflash_engine.accepted import Accepted
from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.errors import ConfigError
from tests.helpers import tiny_draft_folder, tiny_model_folder

SETTINGS = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 128}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    file = tmp_path / "orders.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"Where is order {i}?"}]} for i in range(5)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def test_rounds_of_all_answers_add_up_to_what_the_engine_counted(tmp_path: Path, dataset: Path):
    # Weak layers behind one embedding: target and draft often agree.
    target = tiny_model_folder(tmp_path, "llama", dtype=torch.float32, std=0.02)
    draft = tiny_draft_folder(tmp_path, target, dtype=torch.float32, std=0.02)
    settings = {"model": str(target), "draft": str(draft), **SETTINGS}
    [(name, figures)] = acceptance_report(settings, [dataset], 4, 21).items()
    assert name == "orders" and figures["prompts"] == 4
    histogram = figures["histogram"]
    accepted = sum(tokens * rounds for tokens, rounds in enumerate(histogram))
    assert len(histogram) == 8 and sum(histogram) == figures["steps"]
    assert accepted + figures["steps"] >= figures["completion_tokens"] - 4
    assert figures["acceptance_length"] == pytest.approx((accepted + figures["steps"]) / figures["steps"])
    assert "orders" in acceptance_table({name: figures})


def test_offered_positions_are_the_tokens_that_the_engine_drafted(tmp_path: Path):
    from dflash_engine.acceptance_report import measured

    target = tiny_model_folder(tmp_path, "llama", dtype=torch.float32, std=0.02)
    draft = tiny_draft_folder(tmp_path, target, dtype=torch.float32, std=0.02)
    core = EngineCore(EngineConfig(model=str(target), draft=str(draft), **SETTINGS))
    accepted, drafted, _, refused = measured(core, [(5, 6, 7), (9, 8), (300,) * 200], 21)
    assert refused == 1 and int(accepted.offered.sum()) == drafted


def test_without_a_draft_there_is_nothing_to_report(tmp_path: Path, dataset: Path):
    target = tiny_model_folder(tmp_path, "llama", dtype=torch.float32)
    with pytest.raises(ConfigError, match="give one"):
        acceptance_report({"model": str(target), "draft": None, **SETTINGS}, [dataset], 4, 8)


def test_lengths_and_rates_follow_from_the_rounds():
    accepted = Accepted(4)
    for drafted, taken in ((3, 3), (3, 0), (3, 1), (1, 1)):
        accepted.add(drafted, taken)
    assert accepted.length == (5 + 4) / 4
    assert accepted.rates == [3 / 4, 1 / 3, 1 / 3]
