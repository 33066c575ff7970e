"""The DFlash draft (arXiv 2602.06036): a small model that fills a block of masks in one pass.

Its layers attend to keys and values made from the target's hidden states (the context), and to the
block itself. Embedding and head are the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_engine.batching import ForwardBatch, Span
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.kv_cache import KVCache, KVShape
from dflash_engine.layers import Layer, Linear, Stack, WeightReader, linear_shapes
from dflash_engine.model_config import DraftConfig
from dflash_engine.ops import Ops
from dflash_engine.rope import rope_tables


def draft_linears(config: DraftConfig) -> tuple[tuple[int, int], ...]:
    hidden = config.hidden_size
    context = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    fc = (hidden, len(config.target_layer_ids) * hidden)
    return (*linear_shapes(config), fc, (context, hidden))


class DraftModel:
    """Weights of a draft in z-lab's format and its two passes. Raises `ConfigError` as the target does."""

    def __init__(
        self,
        config: DraftConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        length: int,
    ) -> None:
        self.config = config
        self._ops = ops
        weights = WeightReader(checkpoint, ops, dtype, device)
        hidden = config.hidden_size
        self._fc = weights.linear("fc", hidden, len(config.target_layer_ids) * hidden)
        self._context_norm = weights.tensor("hidden_norm.weight", hidden)
        layers = [
            Layer.read(
                weights,
                f"layers.{index}",
                config,
                span,
                qkv_bias=config.attention_bias,
                o_bias=config.attention_bias,
                mlp_bias=False,
                qk_norm=True,
            )
            for index, span in enumerate(zip(config.windows, config.causal, strict=True))
        ]
        norm = weights.tensor("norm.weight", hidden)
        self._context_kv = self._context_projection(weights)
        checkpoint.finish()
        cos, sin = rope_tables(config.rope, config.head_dim, length)
        rope = (cos.to(device), sin.to(device))
        self._stack = Stack(layers, norm, rope, config.num_heads, config.rms_norm_eps)

    def _context_projection(self, weights: WeightReader) -> Linear:
        """k and v projections of all layers as one linear: [layer 0's k, its v, layer 1's k, ...]."""
        config = self.config
        kv = config.num_kv_heads * config.head_dim
        names = {
            f"{index}.self_attn.{name}": kv
            for index in range(config.num_layers)
            for name in ("k_proj", "v_proj")
        }
        return weights.fused("layers", names, config.hidden_size, config.attention_bias)

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)

    @property
    def spans(self) -> frozenset[Span]:
        return self._stack.spans

    def write_context(self, features: Tensor, batch: ForwardBatch, cache: KVCache) -> None:
        """Target features [T, K H] of committed tokens -> every layer's keys and values at their slots."""
        ops, eps, rope = self._ops, self.config.rms_norm_eps, self._stack.rope
        context = ops.rms_norm(self._fc(ops, features), self._context_norm, eps)
        kv = self._context_kv(ops, context).chunk(self.config.num_layers, dim=1)
        for index, layer in enumerate(self._stack.layers):
            norms = (None, layer.k_norm)
            keys, values = cache.keys[index], cache.values[index]
            ops.rope_store(kv[index], 0, norms, eps, rope, batch.positions, batch.slots, keys, values)

    def forward(self, embedded: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Blocks [anchor, mask, ...] embedded [T, H] -> normed hidden states [T, H] for the target's head.

        Row i of a block is the guess for its own position. The block's keys and values take the slots of
        its positions until `write_context` gives them the committed tokens' own.
        """
        hidden, _ = self._stack.forward(self._ops, embedded, batch, cache)
        return hidden
