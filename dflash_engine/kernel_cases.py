"""What a model asks of its kernels, each as a call that can be checked, timed and had in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_engine.model_config import DraftConfig, ModelConfig
from dflash_engine.ops import Ops, ReferenceOps, empty_rows
from dflash_engine.rope import rope_tables

KV_BLOCK = 16
EPS = 1e-6

Call = Callable[[Tensor | None], Tensor]
"""The results of the rows of these indices, ascending, one row of the tensor each; None: of all, with no
more work than the kernel's own."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on so many rows. `build` and `plain` make their tensors anew, always the same ones."""

    name: str
    rows: int
    build: Callable[[Ops | ReferenceOps], Call]
    plain: Callable[[], Callable[[], Any]] | None
    """The same on all rows in a few operations of torch."""
    num_bytes: int
    """Read and written at least."""
    num_flops: int
    judge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Expected and found for (results, rows), where the reference's own results are not what to expect."""


@dataclass(frozen=True, slots=True)
class Place:
    """Device and dtype of a case's tensors."""

    device: torch.device
    dtype: torch.dtype

    def noise(self, seed: int, *shape: int, scale: float = 1.0, around: float = 0.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 2:  # as the models' own rows are
            made = empty_rows(shape[0], shape[1], made)
        return made.normal_(around, scale, generator=generator)

    def bytes(self, *elements: int) -> int:
        return sum(elements) * self.dtype.itemsize


def model_cases(model: ModelConfig, draft: DraftConfig | None, rows: int, place: Place) -> list[Case]:
    """Linears, norm, rope, head and the draft's context in the shapes of a model."""
    hidden, query = model.hidden_size, model.num_heads * model.head_dim
    found = [
        rms_norm(rows, hidden, place),
        qkv(model, rows, place),
        add_linear("o", rows, hidden, query, place),
    ]
    if model.experts is None or len(model.experts.layers) < model.num_layers:
        inner = model.intermediate_size
        found += [gate_up(rows, inner, hidden, place), add_linear("down", rows, hidden, inner, place)]
    found.append(head(rows, model.vocab_size, hidden, place))
    if draft is not None:
        found.append(context(draft, rows, place))
    return found


def rms_norm(rows: int, width: int, place: Place) -> Case:
    def build(ops: Any) -> Call:
        x, norm = place.noise(1, rows, width), place.noise(2, width, scale=0.1, around=1)
        return lambda chosen: ops.rms_norm(_of(x, chosen), norm, EPS)

    def plain() -> Callable[[], Any]:
        x, norm = place.noise(1, rows, width), place.noise(2, width, scale=0.1, around=1)
        return lambda: F.rms_norm(x, (width,), norm, EPS)

    return Case("rms_norm", rows, build, plain, place.bytes(2 * rows * width, width), 4 * rows * width)


def add_linear(name: str, rows: int, outputs: int, width: int, place: Place) -> Case:
    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        weight = place.noise(3, outputs, width, scale=width**-0.5)
        return place.noise(1, rows, width), place.noise(2, rows, outputs), weight

    def build(ops: Any) -> Call:
        x, residual, weight = tensors()
        packed = ops.pack(weight)

        def call(chosen: Tensor | None) -> Tensor:
            into = _of(residual, chosen)
            ops.add_linear(into, _of(x, chosen), packed, None)
            return into

        return call

    def plain() -> Callable[[], Any]:
        x, residual, weight = tensors()
        return lambda: torch.addmm(residual, x, weight.T, out=residual)

    moved = place.bytes(outputs * width, rows * width, 2 * rows * outputs)
    return Case(f"{name} {outputs}x{width}", rows, build, plain, moved, 2 * rows * outputs * width)


def gate_up(rows: int, inner: int, width: int, place: Place) -> Case:
    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        weight = place.noise(3, 2 * inner, width, scale=width**-0.5)
        return place.noise(1, rows, width), place.noise(2, width, scale=0.1, around=1), weight

    def build(ops: Any) -> Call:
        x, norm, weight = tensors()
        packed = ops.pack(weight, norm)
        return lambda chosen: ops.gate_up(_of(x, chosen), norm, EPS, packed, None)

    def plain() -> Callable[[], Any]:
        x, norm, weight = tensors()

        def call() -> Tensor:
            gate, up = F.linear(F.rms_norm(x, (width,), norm, EPS), weight).chunk(2, dim=-1)
            return F.silu(gate) * up

        return call

    moved = place.bytes(2 * inner * width, rows * (width + inner))
    return Case(f"gate_up 2x{inner}x{width}", rows, build, plain, moved, 4 * rows * inner * width)


def qkv(model: ModelConfig, rows: int, place: Place) -> Case:
    """Norm, projection, norms of the heads where the model has them, rope, and the store to the caches."""
    heads, kv_heads, dim, width = model.num_heads, model.num_kv_heads, model.head_dim, model.hidden_size
    outputs = (heads + 2 * kv_heads) * dim
    positions = torch.arange(rows, dtype=torch.int32, device=place.device) % model.max_position_embeddings
    slots = torch.arange(rows, device=place.device)
    length = min(rows, model.max_position_embeddings)
    cos, sin = (table.to(place.device) for table in rope_tables(model.rope, dim, length))

    def tensors() -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, Tensor | None], list[Tensor]]:
        weight = place.noise(3, outputs, width, scale=width**-0.5)
        norms = [place.noise(4 + at, dim, scale=0.1, around=1) if model.qk_norm else None for at in range(2)]
        caches = [place.noise(6, -(-rows // KV_BLOCK), KV_BLOCK, kv_heads, dim) for _ in range(2)]
        norm = place.noise(2, width, scale=0.1, around=1)
        return place.noise(1, rows, width), norm, weight, (norms[0], norms[1]), caches

    def build(ops: Any) -> Call:
        x, norm, weight, norms, caches = tensors()
        packed = ops.pack(weight, norm)

        def call(chosen: Tensor | None) -> Tensor:
            at, where = _of(positions, chosen), _of(slots, chosen)
            query: Tensor = ops.qkv(
                _of(x, chosen), norm, EPS, packed, None, heads, norms, (cos, sin), at, where, *caches
            )
            if chosen is None:
                return query
            stored = [cache.flatten(0, 1)[where].flatten(1) for cache in caches]
            return torch.cat([query.flatten(1), *stored], dim=1)

        return call

    def plain() -> Callable[[], Any]:
        x, norm, weight, norms, caches = tensors()
        at = positions.long()

        def turned(part: Tensor, with_norm: Tensor | None) -> Tensor:
            if with_norm is not None:
                part = F.rms_norm(part, (dim,), with_norm, EPS)
            low, high = part.chunk(2, dim=-1)
            c, s = (table[at].unsqueeze(1) for table in (cos, sin))
            return torch.cat([low * c - high * s, high * c + low * s], dim=-1).to(place.dtype)

        def call() -> Tensor:
            mixed = F.linear(F.rms_norm(x, (width,), norm, EPS), weight).view(rows, -1, dim)
            q, k, v = mixed.split([heads, kv_heads, kv_heads], dim=1)
            caches[0].flatten(0, 1).index_copy_(0, slots, turned(k, norms[1]))
            caches[1].flatten(0, 1).index_copy_(0, slots, v)
            return turned(q, norms[0])

        return call

    moved = place.bytes(outputs * width, rows * (width + outputs))
    return Case(f"qkv {outputs}x{width}", rows, build, plain, moved, 2 * rows * outputs * width)


def head(rows: int, vocab: int, width: int, place: Place) -> Case:
    """The best token, norm and head included."""

    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        weight = place.noise(3, vocab, width, scale=width**-0.5)
        return place.noise(1, rows, width), place.noise(2, width, scale=0.1, around=1), weight

    def build(ops: Any) -> Call:
        x, norm, weight = tensors()
        packed = ops.pack(weight)
        return lambda chosen: ops.best(_of(x, chosen), norm, EPS, packed, None)

    def plain() -> Callable[[], Any]:
        x, norm, weight = tensors()
        return lambda: F.linear(F.rms_norm(x, (width,), norm, EPS), weight).argmax(-1)

    def judge(best: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the best tokens and of those found: with rounding, equals may change places."""
        x, norm, weight = tensors()
        logits = F.rms_norm(x[chosen].float(), (width,), norm.float(), EPS) @ weight.float().T
        return logits.amax(-1), logits.gather(1, best.long().unsqueeze(1)).squeeze(1)

    moved = place.bytes(vocab * width, rows * width)
    return Case(f"head {vocab}x{width}", rows, build, plain, moved, 2 * rows * vocab * width, judge)


def context(draft: DraftConfig, rows: int, place: Place) -> Case:
    """Features of the target to keys and values of all the draft's layers."""
    width, layers, kv_heads, dim = draft.hidden_size, draft.num_layers, draft.num_kv_heads, draft.head_dim
    features, outputs = len(draft.target_layer_ids) * width, 2 * layers * kv_heads * dim
    positions = torch.arange(rows, dtype=torch.int32, device=place.device) % draft.max_position_embeddings
    slots = torch.arange(rows, device=place.device)
    length = min(rows, draft.max_position_embeddings)
    cos, sin = (table.to(place.device) for table in rope_tables(draft.rope, dim, length))

    def build(ops: Any) -> Call:
        x, norm = place.noise(1, rows, features), place.noise(2, width, scale=0.1, around=1)
        fc = ops.pack(place.noise(3, width, features, scale=features**-0.5))
        kv = ops.pack(place.noise(4, outputs, width, scale=width**-0.5), norm)
        k_norms = place.noise(5, layers, dim, scale=0.1, around=1)
        shape = (layers, -(-rows // KV_BLOCK), KV_BLOCK, kv_heads, dim)
        caches = [torch.zeros(shape, dtype=place.dtype, device=place.device) for _ in range(2)]

        def call(chosen: Tensor | None) -> Tensor:
            at, where = _of(positions, chosen), _of(slots, chosen)
            ops.context(_of(x, chosen), fc, norm, EPS, kv, None, k_norms, (cos, sin), at, where, *caches)
            if chosen is None:
                return caches[0]
            return torch.cat(
                [each.flatten(1, 2)[:, where].transpose(0, 1).flatten(1) for each in caches], dim=1
            )

        return call

    def plain() -> Callable[[], Any]:
        x, norm = place.noise(1, rows, features), place.noise(2, width, scale=0.1, around=1)
        fc, kv = place.noise(3, width, features), place.noise(4, outputs, width)
        cache = place.noise(6, rows, outputs)
        return lambda: cache.copy_(F.linear(F.rms_norm(F.linear(x, fc), (width,), norm, EPS), kv))

    moved = place.bytes(width * features, outputs * width, rows * (features + outputs))
    flops = 2 * rows * width * (features + outputs)
    return Case(f"context {features}-{width}-{outputs}", rows, build, plain, moved, flops)


def _of(rows: Tensor, chosen: Tensor | None) -> Tensor:
    return rows if chosen is None else rows[chosen]
