"""The draft's forward pass over many blocks of many sequences at once.

Each block's rows see their own block, without causality, and the context of their sequence before the
anchor; nothing else. Plain torch with static shapes: autograd, torch.compile and CUDA graphs take it as it
is. The engine's `DraftModel` computes the same from a cache.

Letters of shapes: b rows, S tokens a row, A anchors a row, B block size, H hidden, K key/value heads with G
query heads each, D head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_engine.model_config import DraftConfig

Rope = tuple[Tensor, Tensor]
"""cos and sin, each [..., D / 2]."""
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """What a pass is given."""

    features: Tensor
    """[b, S, F]: the target's hidden states."""
    embedded: Tensor
    """[b, A, B, H]: anchor and masks."""
    visible: Tensor
    """bool [b, A, S]: which context each block sees."""
    context_rope: Rope
    """[b, S, D / 2]"""
    block_rope: Rope
    """[b, A, B, D / 2]"""


def draft_layer(
    hidden: Tensor, context: Tensor, weights: Weights, config: DraftConfig, blocks: Blocks
) -> Tensor:
    """hidden [b, A, B, H] and context [b, S, H] -> hidden. weights have names within the layer, so that
    torch.compile makes one function for all layers."""
    hidden = hidden + _attention(hidden, context, weights, config, blocks)
    normed = _norm(hidden, weights["post_attention_layernorm.weight"], config)
    gate, up = F.linear(normed, _fused(weights, "mlp", "gate", "up")).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"])


LayerForward = Callable[[Tensor, Tensor, Weights, DraftConfig, Blocks], Tensor]


def draft_hidden(
    weights: Weights, config: DraftConfig, blocks: Blocks, layer_forward: LayerForward = draft_layer
) -> Tensor:
    """Normed hidden states [b, A, B - 1, H] of the masks, in the dtype of weights and features."""
    context = _norm(F.linear(blocks.features, weights["fc.weight"]), weights["hidden_norm.weight"], config)
    hidden = blocks.embedded
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): part for name, part in weights.items() if name.startswith(prefix)}
        hidden = layer_forward(hidden, context, own, config, blocks)
    return _norm(hidden[:, :, 1:], weights["norm.weight"], config)


def _attention(
    hidden: Tensor, context: Tensor, weights: Weights, config: DraftConfig, blocks: Blocks
) -> Tensor:
    num_kv, head, group = config.num_kv_heads, config.head_dim, config.group
    q_norm, k_norm = (weights[f"self_attn.{part}_norm.weight"] for part in "qk")
    normed = _norm(hidden, weights["input_layernorm.weight"], config)
    heads = F.linear(normed, _fused(weights, "self_attn", "q", "k", "v")).unflatten(-1, (-1, head))
    query, keys, values = heads.split([num_kv * group, num_kv, num_kv], dim=3)
    query = _rotated(_norm(query, q_norm, config), blocks.block_rope)
    keys = _rotated(_norm(keys, k_norm, config), blocks.block_rope)
    outer = F.linear(context, _fused(weights, "self_attn", "k", "v")).unflatten(-1, (2, num_kv, head))
    outer_keys = _rotated(_norm(outer[:, :, 0], k_norm, config), blocks.context_rope)
    # [b, K, A, B G, D], so that one product holds all rows that share keys.
    query = query.unflatten(3, (num_kv, group)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4) * head**-0.5
    mixed = _attend(
        query,
        (keys.permute(0, 3, 1, 2, 4), values.permute(0, 3, 1, 2, 4)),
        (outer_keys.transpose(1, 2), outer[:, :, 1].transpose(1, 2)),
        blocks.visible,
    )
    mixed = mixed.unflatten(3, (-1, group)).permute(0, 2, 3, 1, 4, 5).flatten(3)
    return F.linear(mixed, weights["self_attn.o_proj.weight"])


def _attend(
    query: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], visible: Tensor
) -> Tensor:
    """query [b, K, A, B G, D] over keys and values of its own block [b, K, A, B, D] and of the context
    [b, K, S, D] where visible [b, A, S] -> as query; one softmax over both."""
    flat = query.flatten(2, 3)
    outside = (flat @ context[0].mT).view(*query.shape[:4], -1).float()
    outside = outside.masked_fill(~visible[:, None, :, None], -torch.inf)
    inside = (query @ own[0].mT).float()
    # A constant taken from all scores changes no softmax, and has no gradient.
    top = torch.maximum(outside.detach().amax(-1), inside.detach().amax(-1)).unsqueeze(-1)
    outside, inside = (outside - top).exp(), (inside - top).exp()
    total = outside.sum(-1, keepdim=True) + inside.sum(-1, keepdim=True)
    mixed = (outside.to(query.dtype).flatten(2, 3) @ context[1]).view(query.shape)
    return ((mixed + inside.to(query.dtype) @ own[1]).float() / total).to(query.dtype)


def _fused(weights: Weights, part: str, *names: str) -> Tensor:
    return torch.cat([weights[f"{part}.{name}_proj.weight"] for name in names])


def _norm(x: Tensor, weight: Tensor, config: DraftConfig) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def _rotated(x: Tensor, rope: Rope) -> Tensor:
    """x [..., heads, D] by cos and sin [..., D / 2], halves as in Llama."""
    cos, sin = (table.unsqueeze(-2) for table in rope)
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
