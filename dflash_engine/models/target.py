"""The target model: Llama, Qwen2 or Qwen3, dense or with experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_engine.batching import ForwardBatch, Span
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.kv_cache import KVCache, KVShape
from dflash_engine.layers import Layer, Stack, WeightReader, linear_shapes
from dflash_engine.model_config import ModelConfig
from dflash_engine.models.experts import Experts, expert_linears
from dflash_engine.ops import Noise, Ops, Weight, empty_rows
from dflash_engine.rope import rope_tables
from dflash_engine.shard import UNDIVIDED, Shard


def target_linears(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    hidden = config.hidden_size
    dense = (*linear_shapes(config), (config.vocab_size, hidden))
    return dense if config.experts is None else (*dense, *expert_linears(hidden, config.experts))


class TargetModel:
    """Weights of a target and its forward pass. Raises `ConfigError` for missing or unexpected tensors.

    `length` is the number of positions served; `shard` says which part of the weights is read.
    """

    def __init__(
        self,
        config: ModelConfig,
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
        vocab, hidden = config.vocab_size, config.hidden_size
        self._embedding = weights.tensor("model.embed_tokens.weight", vocab, hidden)
        layers = [self._read_layer(weights, index) for index in range(config.num_layers)]
        norm = weights.tensor("model.norm.weight", hidden)
        tied = config.tie_word_embeddings
        self._head = ops.pack(self._embedding if tied else weights.tensor("lm_head.weight", vocab, hidden))
        checkpoint.finish(ignore=("lm_head.weight",) if tied else ())
        cos, sin = rope_tables(config.rope, config.head_dim, length)
        rope = (cos.to(device), sin.to(device))
        self._stack = Stack(layers, norm, rope, self.share.num_heads, config.rms_norm_eps)

    def _read_layer(self, weights: WeightReader, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}"
        mlp = None
        if config.experts is not None and index in config.experts.layers:
            mlp = Experts.read(weights, prefix, config.hidden_size, config.experts)
        return Layer.read(
            weights,
            prefix,
            config,
            (config.windows[index], True),
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            mlp_bias=config.mlp_bias,
            qk_norm=config.qk_norm,
            mlp=mlp,
        )

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.config.num_layers, self.share.num_kv_heads, self.config.head_dim)

    @property
    def spans(self) -> frozenset[Span]:
        return self._stack.spans

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> [T, H], with room behind it as `empty_rows` has."""
        rows = empty_rows(len(tokens), self.config.hidden_size, self._embedding)
        return torch.index_select(self._embedding, 0, tokens, out=rows)

    @property
    def norm(self) -> Tensor:
        """The norm [H] behind the last layer."""
        return self._stack.norm

    @property
    def head(self) -> Weight:
        """[V, H], for the draft too."""
        return self._head

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden states [T, H] -> float32 [T, V]."""
        return self._ops.logits(hidden, self._stack.norm, self.config.rms_norm_eps, self._head)

    def best(self, logits: Tensor) -> list[int]:
        """The greedy choice for each row of float32 [T, V]."""
        return self._ops.argmax(logits)

    def best_of(self, hidden: Tensor, noise: Noise | None) -> Tensor:
        """int32 [T]: the choice for each of the hidden states [T, H], greedy or with noise alone."""
        return self._ops.best(hidden, self._stack.norm, self.config.rms_norm_eps, self._head, noise)

    def forward(
        self,
        tokens: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
        taps: Sequence[int],
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """tokens int64 [T] -> last hidden states before the norm [T, H], and features [T, len(taps) H]:
        the outputs of the layers `taps` side by side, written into `features` where given."""
        hidden = self.embed(tokens)
        width = self.config.hidden_size
        if features is None:
            features = hidden.new_empty(len(hidden), len(taps) * width)
        tapped = dict(zip(taps, features.split(width, dim=1), strict=True)) if taps else {}
        self._stack.forward(self._ops, hidden, batch, cache, tapped)
        return hidden, features
