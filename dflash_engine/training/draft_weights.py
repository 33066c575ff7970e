"""The weights of a draft in training: one flat vector, seen under the published names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash_engine.checkpoint import Checkpoint
from dflash_engine.errors import ConfigError
from dflash_engine.model_config import DraftConfig, ModelConfig, build_target_layer_ids, read_draft_config
from dflash_engine.rope import RopeConfig
from dflash_engine.training.config import DraftSizes

STD = 0.02


def draft_config(sizes: DraftSizes, target: ModelConfig) -> DraftConfig:
    """The shape of a draft for this target. Raises `ConfigError` where it cannot work."""
    layers = sizes.context_layers
    ids = build_target_layer_ids(target.num_layers, layers) if isinstance(layers, int) else layers
    if not ids or not all(0 <= layer < target.num_layers for layer in ids):
        raise ConfigError(
            f"draft.context_layers {list(ids)}: the layers of the target are 0..{target.num_layers - 1}"
        )
    if sizes.mask_token_id >= target.vocab_size:
        raise ConfigError(
            f"draft.mask_token_id {sizes.mask_token_id} lies outside the vocabulary of {target.vocab_size}"
        )
    heads, kv_heads = sizes.heads or target.num_heads, sizes.kv_heads or target.num_kv_heads
    if heads % kv_heads:
        raise ConfigError(f"draft.heads {heads} cannot share {kv_heads} key/value heads evenly")
    return DraftConfig(
        num_layers=sizes.layers,
        hidden_size=target.hidden_size,
        intermediate_size=sizes.intermediate_size or target.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=sizes.head_dim or target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(target.rope.theta),
        attention_bias=False,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        block_size=sizes.block_size,
        mask_token_id=sizes.mask_token_id,
        target_layer_ids=tuple(ids),
        windows=(None,) * sizes.layers,
        causal=(False,) * sizes.layers,
    )


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of the draft's tensors."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        shapes |= {
            f"layers.{layer}.input_layernorm.weight": (hidden,),
            f"layers.{layer}.self_attn.q_proj.weight": (query, hidden),
            f"layers.{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"layers.{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"layers.{layer}.self_attn.o_proj.weight": (hidden, query),
            f"layers.{layer}.self_attn.q_norm.weight": (head,),
            f"layers.{layer}.self_attn.k_norm.weight": (head,),
            f"layers.{layer}.post_attention_layernorm.weight": (hidden,),
            f"layers.{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"norm.weight": (hidden,)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor stands in the flat vector."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors inside flat [size], by name."""
        parts = flat.split([math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}


def initial(config: DraftConfig, final_norm: Tensor, seed: int) -> Tensor:
    """Flat float32 on the CPU: matrices around 0, those that add to the residual narrower; norms of one, the
    last one the target's own [H], since the head behind it is the target's."""
    layout = Layout(tensor_shapes(config))
    flat = torch.empty(layout.size, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in layout.views(flat).items():
        if "norm" in name:
            tensor.fill_(1.0)
        else:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensor.normal_(0.0, STD / math.sqrt(2 * config.num_layers) if adds else STD, generator=generator)
    layout.views(flat)["norm.weight"].copy_(final_norm)
    return flat


def read_weights(folder: Path, config: DraftConfig, target: ModelConfig) -> Tensor:
    """Flat float32 of a draft folder. Raises `ConfigError` where its shape is another one."""
    found = read_draft_config(folder, target)
    # What only names or limits differ in may be changed on the way.
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "target_layer_ids", "mask_token_id"):
        there, asked = getattr(found, field), getattr(config, field)
        if there != asked:
            raise ConfigError(f"draft.init_from {folder}: {field} is {there}, asked is {asked}")
    checkpoint = Checkpoint(folder)
    layout = Layout(tensor_shapes(config))
    flat = torch.empty(layout.size, dtype=torch.float32)
    for name, tensor in layout.views(flat).items():
        tensor.copy_(checkpoint.take(name, tensor.shape))
    checkpoint.finish()
    return flat
