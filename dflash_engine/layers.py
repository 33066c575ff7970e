"""Transformer layers and the stack of them that target and draft share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash_engine.batching import ForwardBatch, Span
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.kv_cache import KVCache
from dflash_engine.ops import Ops, Weight
from dflash_engine.shard import Shard


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


class WeightReader:
    """Takes tensors out of a checkpoint in the engine's dtype, fused and packed: of those that are divided
    among ranks, the shard's part. Shapes are those of the whole model."""

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._shard = shard

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._moved(self._checkpoint.take(name, shape))

    def _part(self, name: str, dim: int, *shape: int) -> Tensor:
        return self._moved(self._shard.part(self._checkpoint.take(name, shape), dim))

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype).contiguous()

    def linear(self, name: str, rows: int, width: int) -> Linear:
        return Linear(self._ops.pack(self.tensor(f"{name}.weight", rows, width)), None)

    def fused(
        self, prefix: str, names: dict[str, int], width: int, bias: bool, norm: Tensor | None = None
    ) -> Linear:
        """One linear from several that share their input, normed by `norm`: their outputs one after the
        other, each divided among the ranks."""
        weight = torch.cat(
            [self._part(f"{prefix}.{name}.weight", 0, rows, width) for name, rows in names.items()]
        )
        biases = (
            [self._part(f"{prefix}.{name}.bias", 0, rows) for name, rows in names.items()] if bias else None
        )
        return Linear(self._ops.pack(weight, norm), torch.cat(biases) if biases else None)

    def summed(self, name: str, rows: int, width: int, bias: bool) -> Linear:
        """A linear for `Ops.add_linear`: its inputs are divided, its bias is added once and is whole."""
        weight = self._part(f"{name}.weight", 1, rows, width)
        return Linear(self._ops.pack(weight), self.tensor(f"{name}.bias", rows) if bias else None)

    def experts(
        self, prefix: str, names: dict[str, int], whole: str, width: int, num: int, dim: int
    ) -> Weight:
        """`num` fused matrices, one an expert, for `Ops.experts`, divided by outputs (dim 0) or inputs (1).

        They stand in the checkpoint one by one, as `{prefix}.0.{name}.weight`, or all as one tensor
        `{prefix}.{whole}` [num, outputs, width].
        """
        return self._ops.pack_experts(self._experts(prefix, names, f"{prefix}.{whole}", width, num, dim), num)

    def _experts(
        self, prefix: str, names: dict[str, int], whole: str, width: int, num: int, dim: int
    ) -> Iterator[Tensor]:
        """One after the other, so that at most one is in memory that is not yet packed."""
        if self._checkpoint.has(whole):
            rows = list(names.values())
            for matrix in self._checkpoint.take(whole, (num, sum(rows), width)):
                yield _joined([self._moved(self._shard.part(part, dim)) for part in matrix.split(rows)])
            return
        for expert in range(num):
            yield _joined(
                [
                    self._part(f"{prefix}.{expert}.{name}.weight", dim, rows, width)
                    for name, rows in names.items()
                ]
            )


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate) * up) of the normed residual, added to it."""

    norm: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def read(cls, weights: WeightReader, prefix: str, hidden: int, inner: int, bias: bool) -> GatedMlp:
        norm = weights.tensor(f"{prefix}.post_attention_layernorm.weight", hidden)
        return cls(
            norm=norm,
            gate_up=weights.fused(
                f"{prefix}.mlp", {"gate_proj": inner, "up_proj": inner}, hidden, bias, norm
            ),
            down=weights.summed(f"{prefix}.mlp.down_proj", hidden, inner, bias),
        )

    def forward(self, ops: Ops, residual: Tensor, eps: float, tap: Tensor | None) -> None:
        inner = ops.gate_up(residual, self.norm, eps, self.gate_up.weight, self.gate_up.bias)
        ops.add_linear(residual, inner, self.down.weight, self.down.bias, tap)


class Mlp(Protocol):
    def forward(self, ops: Ops, residual: Tensor, eps: float, tap: Tensor | None) -> None:
        """Adds to residual [T, H] in place; `tap` [T, H] gets a copy of the sum."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Llama's and Qwen's pre-norm layer: attention and MLP, each added to the residual."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp: Mlp
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
        mlp: Mlp | None = None,
    ) -> Layer:
        """Takes the layer's tensors. `mlp` stands in for the dense MLP of `sizes`."""
        hidden, inner, head = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
        query, kv = sizes.num_heads * head, sizes.num_kv_heads * head
        attention = f"{prefix}.self_attn"
        input_norm = weights.tensor(f"{prefix}.input_layernorm.weight", hidden)
        projections = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        return cls(
            input_norm=input_norm,
            qkv=weights.fused(attention, projections, hidden, qkv_bias, input_norm),
            q_norm=weights.tensor(f"{attention}.q_norm.weight", head) if qk_norm else None,
            k_norm=weights.tensor(f"{attention}.k_norm.weight", head) if qk_norm else None,
            output=weights.summed(f"{attention}.o_proj", hidden, query, o_bias),
            mlp=mlp or GatedMlp.read(weights, prefix, hidden, inner, mlp_bias),
            span=span,
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of one model, and the norm behind them."""

    layers: Sequence[Layer]
    norm: Tensor
    rope: tuple[Tensor, Tensor]
    num_heads: int
    eps: float

    @property
    def spans(self) -> frozenset[Span]:
        return frozenset(layer.span for layer in self.layers)

    def forward(
        self, ops: Ops, residual: Tensor, batch: ForwardBatch, cache: KVCache, taps: Mapping[int, Tensor]
    ) -> None:
        """Embedded rows [T, H], which become the last hidden states before `norm`, in place.

        `taps` [T, H] get the outputs of the 0-based layers that they stand under, before any norm
        (transformers' hidden_states[i + 1]). Writes the rows' keys and values.
        """
        for index, layer in enumerate(self.layers):
            keys, values = cache.keys[index], cache.values[index]
            query = ops.qkv(
                residual,
                layer.input_norm,
                self.eps,
                layer.qkv.weight,
                layer.qkv.bias,
                self.num_heads,
                (layer.q_norm, layer.k_norm),
                self.rope,
                batch.positions,
                batch.slots,
                keys,
                values,
            )
            begin, end = batch.spans[layer.span]
            mixed = ops.attention(query, keys, values, batch.tables, batch.row_seq, begin, end, batch.tiling)
            ops.add_linear(residual, mixed, layer.output.weight, layer.output.bias)
            layer.mlp.forward(ops, residual, self.eps, taps.get(index))
