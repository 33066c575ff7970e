"""Writes the draft as a folder in the published format, which engines load unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_engine.model_config import DraftConfig, ModelConfig
from dflash_engine.training.config import TrainConfig


def published_config(draft: DraftConfig, target: ModelConfig) -> dict[str, Any]:
    """config.json with the keys of z-lab's checkpoints."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": draft.block_size,
        "dflash_config": {
            "mask_token_id": draft.mask_token_id,
            "target_layer_ids": list(draft.target_layer_ids),
        },
        "num_target_layers": target.num_layers,
        "num_hidden_layers": draft.num_layers,
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads,
        "head_dim": draft.head_dim,
        "rms_norm_eps": draft.rms_norm_eps,
        "rope_theta": draft.rope.theta,
        "rope_scaling": None,
        "attention_bias": draft.attention_bias,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * draft.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": draft.num_layers,
        "max_position_embeddings": draft.max_position_embeddings,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": draft.vocab_size,
        "dtype": "bfloat16",
        "eos_token_id": target.eos_token_ids[0] if target.eos_token_ids else None,
    }


def export(
    folder: Path, draft: DraftConfig, target: ModelConfig, weights: Mapping[str, Tensor], readme: str
) -> int:
    """config.json, model.safetensors in bfloat16 and README.md; returns the weights' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()
    }
    unfinished = folder / "model.safetensors.unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    (folder / "config.json").write_text(json.dumps(published_config(draft, target), indent=2) + "\n")
    (folder / "README.md").write_text(readme, encoding="utf-8")
    path = folder / "model.safetensors"
    unfinished.replace(path)
    return path.stat().st_size


def readme(
    config: TrainConfig,
    draft: DraftConfig,
    parameters: int,
    data: Mapping[str, int],
    history: Sequence[Mapping[str, Any]],
    step: int,
    seconds: float,
) -> str:
    """What the draft is, what it was trained on and how, and how well it drafts."""
    loss = f"gamma {config.loss.gamma:g}" if config.loss.kind == "decay" else f"alpha {config.loss.alpha:g}"
    optimizer, asked = config.optimizer, config.evaluation
    last = history[-1] if history else {}
    lengths = last.get("acceptance_length", {})
    lines = [
        f"# DFlash draft for {config.target}",
        "",
        f"{draft.num_layers} layers, block {draft.block_size}, context layers "
        f"{', '.join(map(str, draft.target_layer_ids))}, mask id {draft.mask_token_id}, "
        f"{parameters / 1e6:.1f} M parameters, bfloat16. Embedding and head are the target's.",
        "",
        "## Acceptance length",
        "",
        "Tokens a verify of the target commits, its own counted: (accepted + steps) / steps over all "
        f"answers together. Greedy, {asked.max_tokens} tokens, the first {asked.prompts} prompts of each set "
        "(`held_out`: answers to prompts of the training pool that were kept apart).",
        "",
        "| set | acceptance length |",
        "|---|---:|",
        *[f"| {name} | {length:.2f} |" for name, length in lengths.items()],
        "",
        "## Data",
        "",
        f"{data['sequences']:,} responses of the target itself, {data['response_tokens']:,} response tokens. "
        f"Left out because their prompt was too close to one of an evaluation set: {data['contaminated']:,}. "
        + config.data_note,
        "",
        "## Recipe",
        "",
        f"{step:,} steps of {config.batch.rows} rows of {config.data.row_tokens} tokens with "
        f"{config.batch.anchors} anchors each, {seconds:,.0f} s; {optimizer.kind}, learning rate "
        f"{optimizer.lr:g}, betas {optimizer.betas[0]:g} and {optimizer.betas[1]:g}, cosine to zero over the "
        f"last {optimizer.decay:.0%}, clipped at {optimizer.clip:g}; cross-entropy weighted by "
        f"{config.loss.kind} ({loss}); seed {config.run.seed}.",
        "",
        "## Licence",
        "",
        f"{config.licence}.",
        "",
    ]
    return "\n".join(lines)
