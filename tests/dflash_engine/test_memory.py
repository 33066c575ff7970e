"""Sizes of the shapes in configs/models against the sizes that these models are known by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_engine.memory import MemoryReport, draft_parameters, memory_report, target_parameters
from dflash_engine.model_config import build_target_layer_ids, read_draft_config, read_model_config

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
# Parameters as the models' cards give them, and drafts' block sizes as published.
KNOWN = {"llama-3.1-8b": (8.03e9, 10), "qwen3-8b": (8.19e9, 16), "qwen3-30b-a3b": (30.5e9, 16)}


def test_every_shape_that_is_shipped_is_known_here():
    assert {folder.name for folder in MODELS.iterdir()} == KNOWN.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_shapes_have_the_sizes_of_the_models_that_they_are_of(name):
    parameters, block_size = KNOWN[name]
    model = read_model_config(MODELS / name)
    draft = read_draft_config(MODELS / name / "draft", model)
    assert target_parameters(model) == pytest.approx(parameters, rel=2e-3)
    assert draft.block_size == block_size
    assert draft.target_layer_ids == build_target_layer_ids(model.num_layers, draft.num_layers)


def test_a_qwen3_8b_drafts_matrices_are_counted_by_hand():
    model = read_model_config(MODELS / "qwen3-8b")
    draft = read_draft_config(MODELS / "qwen3-8b" / "draft", model)
    attention = 4096 * 4096 + 2 * 1024 * 4096 + 4096 * 4096
    layer = attention + 3 * 12288 * 4096
    context = 5 * 2 * 1024 * 4096
    assert draft_parameters(draft) == 5 * layer + 5 * 4096 * 4096 + context


def test_kv_bytes_are_those_of_layers_heads_and_dtype():
    model = read_model_config(MODELS / "qwen3-8b")
    report = memory_report(model, None, torch.bfloat16, 1000)
    assert (report.target_kv_bytes, report.draft_bytes, report.draft_kv_bytes) == (2 * 36 * 8 * 128 * 2, 0, 0)
    assert report.kv_tokens_lost == 0
    assert "draft" not in str(report)


def test_what_the_draft_costs_is_what_its_memory_would_hold():
    report = MemoryReport(
        target_bytes=10_000, draft_bytes=500, target_kv_bytes=100, draft_kv_bytes=10, kv_tokens=1000
    )
    # The pool's 110,000 bytes and the draft's 500 hold 1,105 tokens of 100.
    assert report.kv_tokens_lost == 105
    assert "room for 105 more KV tokens" in str(report)
