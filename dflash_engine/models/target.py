"""The target model: Llama, Qwen2 or Qwen3, dense."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_engine.batching import ForwardBatch, Span
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.kv_cache import KVCache, KVShape
from dflash_engine.layers import Layer, Stack, WeightReader, linear_shapes
from dflash_engine.model_config import ModelConfig
from dflash_engine.ops import Ops
from dflash_engine.rope import rope_tables


def target_linears(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    return (*linear_shapes(config), (config.vocab_size, config.hidden_size))


class TargetModel:
    """Weights of a target and its forward pass. Raises `ConfigError` for missing or unexpected tensors.

    `length` is the number of positions served.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        length: int,
    ) -> None:
        self.config = config
        self._ops = ops
        weights = WeightReader(checkpoint, ops, dtype, device)
        vocab, hidden = config.vocab_size, config.hidden_size
        self._embedding = weights.tensor("model.embed_tokens.weight", vocab, hidden)
        layers = [
            Layer.read(
                weights,
                f"model.layers.{index}",
                config,
                (window, True),
                qkv_bias=config.qkv_bias,
                o_bias=config.o_bias,
                mlp_bias=config.mlp_bias,
                qk_norm=config.qk_norm,
            )
            for index, window in enumerate(config.windows)
        ]
        norm = weights.tensor("model.norm.weight", hidden)
        tied = config.tie_word_embeddings
        self._head = ops.pack(self._embedding if tied else weights.tensor("lm_head.weight", vocab, hidden))
        checkpoint.finish(ignore=("lm_head.weight",) if tied else ())
        cos, sin = rope_tables(config.rope, config.head_dim, length)
        rope = (cos.to(device), sin.to(device))
        self._stack = Stack(layers, norm, rope, config.num_heads, config.rms_norm_eps)

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)

    @property
    def spans(self) -> frozenset[Span]:
        return self._stack.spans

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> [T, H]"""
        return F.embedding(tokens, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [T, H] -> float32 [T, V]; the draft's too."""
        return self._ops.logits(hidden, self._head)

    def best(self, logits: Tensor) -> list[int]:
        """The greedy choice for each row of float32 [T, V]."""
        return self._ops.argmax(logits)

    def forward(
        self, tokens: Tensor, batch: ForwardBatch, cache: KVCache, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """tokens int64 [T] -> normed last hidden states [T, H], and features of the layers `taps`."""
        return self._stack.forward(self._ops, self.embed(tokens), batch, cache, taps)
