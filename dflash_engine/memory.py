"""What target and draft take of the device's memory, and what the draft costs the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_engine.kv_cache import KVShape
from dflash_engine.layers import LayerSizes, linear_shapes
from dflash_engine.model_config import DraftConfig, ModelConfig
from dflash_engine.models.draft import draft_linears
from dflash_engine.models.experts import expert_linears


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one engine's weights and of each token in its KV pools; the draft's are 0 without one."""

    target_bytes: int
    draft_bytes: int
    target_kv_bytes: int
    """Of one token."""
    draft_kv_bytes: int
    """Of one token."""
    kv_tokens: int
    """That the pools hold."""

    @property
    def kv_tokens_lost(self) -> int:
        """Tokens that the same memory would hold more if there were no draft in it."""
        pool = self.kv_tokens * (self.target_kv_bytes + self.draft_kv_bytes)
        return (pool + self.draft_bytes) // self.target_kv_bytes - self.kv_tokens

    def __str__(self) -> str:
        text = (
            f"target {self.target_bytes / 1e9:.2f} GB of weights, {self.target_kv_bytes:,} bytes a KV token; "
            f"{self.kv_tokens:,} KV tokens"
        )
        if not self.draft_bytes:
            return text
        return (
            f"{text}; draft costs {self.draft_bytes / 1e9:.2f} GB of weights, {self.draft_kv_bytes:,} bytes "
            f"a KV token, in all room for {self.kv_tokens_lost:,} more KV tokens"
        )


def memory_report(
    model: ModelConfig, draft: DraftConfig | None, dtype: torch.dtype, kv_tokens: int
) -> MemoryReport:
    """`draft` is the one in use, if any. Norms and biases, below a thousandth, are left out."""
    return MemoryReport(
        target_bytes=target_parameters(model) * dtype.itemsize,
        draft_bytes=draft_parameters(draft) * dtype.itemsize if draft is not None else 0,
        target_kv_bytes=_kv_bytes(model.num_layers, model, dtype),
        draft_kv_bytes=_kv_bytes(draft.num_layers, draft, dtype) if draft is not None else 0,
        kv_tokens=kv_tokens,
    )


def target_parameters(config: ModelConfig) -> int:
    """Elements of the target's matrices, all experts included."""
    qkv, output, *dense = linear_shapes(config)
    attention = _elements(qkv, output)
    num_sparse = 0
    sparse = 0
    if config.experts is not None:
        router, gate_up, down = expert_linears(config.hidden_size, config.experts)
        sparse = _elements(router) + config.experts.num_experts * _elements(gate_up, down)
        num_sparse = len(config.experts.layers)
    layers = config.num_layers * attention + (config.num_layers - num_sparse) * _elements(*dense)
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    return layers + num_sparse * sparse + tables


def draft_parameters(config: DraftConfig) -> int:
    """Elements of the draft's matrices; k and v projections stand there twice, once for the context."""
    layer = linear_shapes(config)
    once = draft_linears(config)[len(layer) :]
    return config.num_layers * _elements(*layer) + _elements(*once)


def _elements(*shapes: tuple[int, int]) -> int:
    return sum(outputs * width for outputs, width in shapes)


def _kv_bytes(num_layers: int, sizes: LayerSizes, dtype: torch.dtype) -> int:
    return KVShape(num_layers, sizes.num_kv_heads, sizes.head_dim).bytes_per_token(dtype)
