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
from dflash_engine.ops import Noise, Ops, Weight
from dflash_engine.rope import rope_tables
from dflash_engine.shard import UNDIVIDED, Shard


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
        shard: Shard = UNDIVIDED,
    ) -> None:
        self.config = config
        self.share = shard.share(config)
        self._ops = ops
        weights = WeightReader(checkpoint, ops, dtype, device, shard)
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
        k_norms = [layer.k_norm for layer in layers if layer.k_norm is not None]
        self._k_norms = torch.stack(k_norms)
        checkpoint.finish()
        cos, sin = rope_tables(config.rope, config.head_dim, length)
        rope = (cos.to(device), sin.to(device))
        self._stack = Stack(layers, norm, rope, self.share.num_heads, config.rms_norm_eps)

    def _context_projection(self, weights: WeightReader) -> Linear:
        """k and v projections of all layers as one linear: [layer 0's k, its v, layer 1's k, ...]."""
        config = self.config
        kv = config.num_kv_heads * config.head_dim
        names = {
            f"{index}.self_attn.{name}": kv
            for index in range(config.num_layers)
            for name in ("k_proj", "v_proj")
        }
        return weights.fused("layers", names, config.hidden_size, config.attention_bias, self._context_norm)

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.config.num_layers, self.share.num_kv_heads, self.config.head_dim)

    @property
    def spans(self) -> frozenset[Span]:
        return self._stack.spans

    @property
    def norm(self) -> Tensor:
        """The norm [H] behind the last layer."""
        return self._stack.norm

    def write_context(self, features: Tensor, positions: Tensor, cells: Tensor, cache: KVCache) -> None:
        """Target features [T, K H] -> every layer's keys and values, for positions int32 [T], at cells
        int64 [T] of the cache."""
        self._ops.context(
            features,
            self._fc.weight,
            self._context_norm,
            self.config.rms_norm_eps,
            self._context_kv.weight,
            self._context_kv.bias,
            self._k_norms,
            self._stack.rope,
            positions,
            cells,
            cache.keys,
            cache.values,
        )

    def forward(self, embedded: Tensor, batch: ForwardBatch, cache: KVCache) -> None:
        """Blocks [anchor, mask, ...] embedded [T, H] become hidden states before the norm, in place.

        Row i of a block is the guess for its own position. The block's keys and values take the slots of
        its positions until `write_context` gives them the committed tokens' own.
        """
        self._stack.forward(self._ops, embedded, batch, cache, {})

    def logits(self, hidden: Tensor, head: Weight) -> Tensor:
        """Hidden states [T, H] under the target's head -> float32 [T, V]."""
        return self._ops.logits(hidden, self._stack.norm, self.config.rms_norm_eps, head)

    def best(self, hidden: Tensor, head: Weight, noise: Noise | None) -> Tensor:
        """int32 [T]: the guess for each of the hidden states [T, H]."""
        return self._ops.best(hidden, self._stack.norm, self.config.rms_norm_eps, head, noise)
