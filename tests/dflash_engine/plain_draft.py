"""The DFlash draft written down plainly: no cache, every step computed again from the tokens.

Follows arXiv 2602.06036; context features are transformers' hidden_states[layer + 1].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb


class PlainDraft:
    """The draft's forward pass in float32 for one block of one sequence."""

    def __init__(self, folder: Path, target_folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.weights = {key.removeprefix("model."): tensor.float() for key, tensor in tensors.items()}
        target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
        self.target = target.eval()
        inner = self.config["dflash_config"]
        self.layer_ids: list[int] = inner["target_layer_ids"]
        self.mask_id: int = inner["mask_token_id"]

    @torch.inference_mode()
    def logits(self, known: Sequence[int], block_length: int) -> Tensor:
        """[block_length - 1, V] for the positions behind the last known token, the anchor."""
        hidden_states = self.target(torch.tensor([known]), output_hidden_states=True).hidden_states
        features = torch.cat([hidden_states[layer + 1][0, :-1] for layer in self.layer_ids], dim=-1)
        context = self._norm(F.linear(features, self.weights["fc.weight"]), "hidden_norm")
        block = torch.tensor([known[-1]] + [self.mask_id] * (block_length - 1))
        x = F.embedding(block, self.target.get_input_embeddings().weight)
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attention(layer, context, self._norm(x, f"layers.{layer}.input_layernorm"))
            x = x + self._mlp(layer, self._norm(x, f"layers.{layer}.post_attention_layernorm"))
        return F.linear(self._norm(x, "norm")[1:], self.target.get_output_embeddings().weight)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = (self._linear(x, f"layers.{layer}.mlp.{part}_proj") for part in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"layers.{layer}.mlp.down_proj")

    def _attention(self, layer: int, context: Tensor, x: Tensor) -> Tensor:
        name, head_dim = f"layers.{layer}.self_attn", self.config["head_dim"]
        both = torch.cat([context, x])
        query, key, value = (
            self._linear(rows, f"{name}.{part}_proj").unflatten(-1, (-1, head_dim))
            for part, rows in (("q", x), ("k", both), ("v", both))
        )
        query, key = self._norm(query, f"{name}.q_norm"), self._norm(key, f"{name}.k_norm")
        angles = torch.outer(
            torch.arange(len(both)).float(),
            self.config["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim),
        )
        cos, sin = (torch.cat([table, table], dim=-1) for table in (angles.cos(), angles.sin()))
        key, _ = apply_rotary_pos_emb(key, key, cos, sin, unsqueeze_dim=1)
        first = len(context)
        query, _ = apply_rotary_pos_emb(query, query, cos[first:], sin[first:], unsqueeze_dim=1)
        group = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1), key, value, self._mask(layer, len(context), len(x))
        )
        return self._linear(mixed.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def _mask(self, layer: int, num_context: int, num_block: int) -> Tensor:
        row = torch.arange(num_context, num_context + num_block).unsqueeze(1)
        column = torch.arange(num_context + num_block)
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        inner = self.config["dflash_config"]
        causal = self.config.get("is_causal", inner.get("causal", sliding))
        seen = column <= row if causal else torch.ones(num_block, num_context + num_block).bool()
        return seen & (row - column < self.config["sliding_window"]) if sliding else seen
