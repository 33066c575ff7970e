"""Models with experts: every layout of their weights, and the same tokens however they are run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_engine import DFlashEngine, Request, SamplingParams
from dflash_engine.errors import ConfigError
from tests.dflash_engine.exactness import assert_every_way_gives_the_same, with_sampling
from tests.dflash_engine.test_exactness import prompts
from tests.helpers import tiny_draft_folder, tiny_model_folder

LAYERS, EXPERTS = 4, 8
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def rewrite(folder: Path, *, whole: bool, drop: str = "") -> set[str]:
    """The folder's weights with one tensor for all experts of a layer, or one for each; `drop` left out.

    Returns the names of the tensors. Both layouts occur: `Qwen3MoeExperts` holds the first, published
    checkpoints the second.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for prefix in [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]:
        for fused, names in PARTS.items():
            if f"{prefix}.{fused}" in tensors:
                stacked = tensors.pop(f"{prefix}.{fused}")
            elif f"{prefix}.0.{names[0]}.weight" in tensors:
                single = [
                    torch.cat([tensors.pop(f"{prefix}.{expert}.{name}.weight") for name in names])
                    for expert in range(EXPERTS)
                ]
                stacked = torch.stack(single)
            else:
                continue
            if whole:
                tensors[f"{prefix}.{fused}"] = stacked
                continue
            for expert, matrix in enumerate(stacked):
                for name, part in zip(names, matrix.chunk(len(names)), strict=True):
                    tensors[f"{prefix}.{expert}.{name}.weight"] = part.contiguous()
    tensors.pop(drop, None)
    save_file(tensors, path, metadata={"format": "pt"})
    return set(tensors)


def tokens(folder: Path, ops: str) -> list[tuple[int, ...]]:
    engine = DFlashEngine(
        str(folder), draft=None, ops=ops, max_model_len=128, kv_cache_tokens=1000, threads=1
    )
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    requests = [Request(token_ids=prompt, sampling=params) for prompt in prompts(3)]
    return [result.tokens for result in engine.generate(requests)]


@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_experts_one_by_one_and_all_in_one_tensor_are_the_same_model(tmp_path, ops):
    folder = tiny_model_folder(tmp_path, "qwen3_moe", mlp_only_layers=[2])
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in rewrite(folder, whole=False)
    single = tokens(folder, ops)
    assert "model.layers.0.mlp.experts.gate_up_proj" in rewrite(folder, whole=True)
    assert tokens(folder, ops) == single
    assert len(set(single)) == len(single)


def test_a_missing_expert_is_named(tmp_path):
    folder = tiny_model_folder(tmp_path, "qwen3_moe")
    missing = "model.layers.1.mlp.experts.5.up_proj.weight"
    rewrite(folder, whole=False, drop=missing)
    with pytest.raises(ConfigError, match=missing):
        tokens(folder, "reference")


def test_experts_of_another_size_than_config_json_says_are_named(tmp_path):
    folder = tiny_model_folder(tmp_path, "qwen3_moe")
    rewrite(folder, whole=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 16}))
    with pytest.raises(ConfigError, match=r"gate_up_proj .* is \[8, 64, 64\], .* asks for \[8, 32, 64\]"):
        tokens(folder, "reference")


@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_every_way_of_running_gives_the_tokens_of_plain_decoding_one_at_a_time(tmp_path, ops):
    target = tiny_model_folder(tmp_path, "qwen3_moe")
    draft = tiny_draft_folder(tmp_path, target)
    build = partial(DFlashEngine, str(target), ops=ops, max_model_len=112, threads=1, kv_cache_tokens=2000)
    requests = with_sampling(prompts(6, longest=24), ["greedy", "everything"], 24)
    assert_every_way_gives_the_same(build, requests, 128, str(draft), thorough=ops == "cpu")
