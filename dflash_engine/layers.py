"""Transformer layers and the stack of them that target and draft share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash_engine.batching import ForwardBatch, Span
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.kv_cache import KVCache
from dflash_engine.ops import Ops, Weight


class LayerSizes(Protocol):
    """What ModelConfig and DraftConfig have in common."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


def linear_shapes(sizes: LayerSizes) -> tuple[tuple[int, int], ...]:
    """[N, K] of a layer's fused weights: qkv, o, gate-up, down."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    query, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    return (query + 2 * kv, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Weight
    bias: Tensor | None

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class WeightReader:
    """Takes tensors out of a checkpoint in the engine's dtype, fused and packed."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.take(name, shape).to(self._device, self._dtype).contiguous()

    def linear(self, name: str, rows: int, width: int) -> Linear:
        return Linear(self._ops.pack(self.tensor(f"{name}.weight", rows, width)), None)

    def fused(self, prefix: str, names: dict[str, int], width: int, bias: bool) -> Linear:
        """One linear from several that share their input: their outputs one after the other."""
        weight = torch.cat(
            [self.tensor(f"{prefix}.{name}.weight", rows, width) for name, rows in names.items()]
        )
        biases = (
            [self.tensor(f"{prefix}.{name}.bias", rows) for name, rows in names.items()] if bias else None
        )
        return Linear(self._ops.pack(weight), torch.cat(biases) if biases else None)


@dataclass(frozen=True, slots=True)
class Layer:
    """Llama's and Qwen's pre-norm layer: attention and gated MLP, each added to the residual."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    span: Span

    @classmethod
    def read(
        cls,
        weights: WeightReader,
        prefix: str,
        sizes: LayerSizes,
        span: Span,
        *,
        qkv_bias: bool,
        o_bias: bool,
        mlp_bias: bool,
        qk_norm: bool,
    ) -> Layer:
        hidden, inner, head = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
        query, kv = sizes.num_heads * head, sizes.num_kv_heads * head
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return cls(
            input_norm=weights.tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=weights.fused(attention, {"q_proj": query, "k_proj": kv, "v_proj": kv}, hidden, qkv_bias),
            q_norm=weights.tensor(f"{attention}.q_norm.weight", head) if qk_norm else None,
            k_norm=weights.tensor(f"{attention}.k_norm.weight", head) if qk_norm else None,
            output=weights.fused(attention, {"o_proj": hidden}, query, o_bias),
            post_norm=weights.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=weights.fused(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, mlp_bias),
            down=weights.fused(mlp, {"down_proj": hidden}, inner, mlp_bias),
            span=span,
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of one model with the norm behind them."""

    layers: Sequence[Layer]
    norm: Tensor
    rope: tuple[Tensor, Tensor]
    num_heads: int
    eps: float

    @property
    def spans(self) -> frozenset[Span]:
        return frozenset(layer.span for layer in self.layers)

    def forward(
        self, ops: Ops, residual: Tensor, batch: ForwardBatch, cache: KVCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Embedded rows [T, H], which are used up -> normed last hidden states [T, H], and features.

        Features [T, len(taps) H] are the outputs of the 0-based layers `taps`, before any norm
        (transformers' hidden_states[i + 1]), side by side. Writes the rows' keys and values.
        """
        tapped = {}
        x = ops.rms_norm(residual, self.layers[0].input_norm, self.eps)
        following = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            mixed = self._attend(ops, layer, x, batch, cache.keys[index], cache.values[index])
            x = ops.rms_norm(mixed, layer.post_norm, self.eps, residual)
            x = layer.down(ops, ops.silu_mul(layer.gate_up(ops, x)))
            x = ops.rms_norm(x, next_norm, self.eps, residual)
            if index in taps:
                tapped[index] = residual.clone()
        features = torch.cat([tapped[tap] for tap in taps], dim=1) if taps else residual[:, :0]
        return x, features

    def _attend(
        self, ops: Ops, layer: Layer, x: Tensor, batch: ForwardBatch, keys: Tensor, values: Tensor
    ) -> Tensor:
        query = ops.rope_store(
            layer.qkv(ops, x),
            self.num_heads,
            (layer.q_norm, layer.k_norm),
            self.eps,
            self.rope,
            batch.positions,
            batch.slots,
            keys,
            values,
        )
        begin, end = batch.spans[layer.span]
        mixed = ops.attention(query, keys, values, batch.tables, batch.row_seq, begin, end)
        return layer.output(ops, mixed)
