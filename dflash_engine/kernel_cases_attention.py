"""Attention, experts and sampling as cases; see `dflash_engine.kernel_cases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_engine.batching import tiles_of
from dflash_engine.experts_config import ExpertsConfig
from dflash_engine.kernel_cases import EPS, KV_BLOCK, Call, Case, Place
from dflash_engine.model_config import DraftConfig, ModelConfig
from dflash_engine.ops import WHOLE, SamplingTable, Tiling, choose, choose_reference, request_key
from dflash_engine.round_layout import splits_of  # the engine's own rule

CONTEXT = 1024
"""Tokens before the rows that decode or verify."""
GATHERED_PAIRS = 64
"""Rows times experts up to which plain torch is given the experts' matrices gathered by row."""


def other_cases(model: ModelConfig, draft: DraftConfig | None, rows: int, place: Place) -> list[Case]:
    """Attention of each kind that so many rows allow, experts where the model has them, and sampling."""
    found = [attention("decode", model, (CONTEXT,) * rows, (1,) * rows, place)]
    block = 1 if draft is None else draft.block_size
    if block > 1 and rows % block == 0:
        num = rows // block
        found.append(attention("verify", model, (CONTEXT,) * num, (block,) * num, place))
    if rows >= 64:
        found.append(attention("prefill", model, (0,), (rows,), place))
    if model.experts is not None:
        found.append(experts(model.hidden_size, model.experts, rows, place))
    found.append(sampling(rows, model.vocab_size, place))
    return found


def attention(
    name: str, model: ModelConfig, starts: tuple[int, ...], counts: tuple[int, ...], place: Place
) -> Case:
    """Sequences whose last `counts` tokens, behind `starts` others, attend to all up to themselves."""
    heads, kv_heads, dim, group = model.num_heads, model.num_kv_heads, model.head_dim, model.group
    rows, longest = sum(counts), max(start + num for start, num in zip(starts, counts, strict=True))
    num_blocks = -(-longest // KV_BLOCK)
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.concatenate([start + 1 + np.arange(num) for start, num in zip(starts, counts, strict=True)])
    tables = torch.arange(len(counts) * num_blocks, dtype=torch.int32, device=place.device).view(
        len(counts), -1
    )
    row_seq, end = (_int32(values, place) for values in (owner, ends))
    begin = torch.zeros_like(end)

    def tiling(sizes: np.ndarray) -> Tiling:
        tiles, tokens = tiles_of(sizes, group)
        num_splits = splits_of(len(tiles) * kv_heads, len(tiles) * tokens, longest)
        return Tiling(torch.from_numpy(tiles).to(place.device), tokens, num_splits)

    whole = tiling(np.array(counts))

    def build(ops: Any) -> Call:
        query = place.noise(1, rows, heads, dim)
        shape = (len(counts) * num_blocks, KV_BLOCK, kv_heads, dim)
        keys, values = place.noise(2, *shape), place.noise(3, *shape)

        def call(chosen: Tensor | None) -> Tensor:
            if chosen is None:
                result: Tensor = ops.attention(query, keys, values, tables, row_seq, begin, end, whole)
                return result
            sequence = row_seq[chosen]
            sizes = sequence.unique_consecutive(return_counts=True)[1].cpu().numpy()
            found: Tensor = ops.attention(
                query[chosen], keys, values, tables, sequence, begin[chosen], end[chosen], tiling(sizes)
            )
            return found

        return call

    def plain() -> Callable[[], Any]:
        each = counts[0]
        q = place.noise(1, len(counts), heads, each, dim)
        k, v = (place.noise(seed, len(counts), kv_heads, longest, dim) for seed in (2, 3))
        seen = None
        if starts[0] and each > 1:
            at = torch.arange(longest, device=place.device)
            seen = at[None, :] <= starts[0] + torch.arange(each, device=place.device)[:, None]
        causal = not starts[0] and each > 1
        return lambda: F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal, enable_gqa=group > 1)

    kv = sum(start + num for start, num in zip(starts, counts, strict=True)) * 2 * kv_heads * dim
    moved = place.bytes(kv, 2 * rows * heads * dim)
    return Case(f"attention {name}", rows, build, plain, moved, 4 * int(ends.sum()) * heads * dim)


def experts(hidden: int, config: ExpertsConfig, rows: int, place: Place) -> Case:
    """Norm, router and a mixture of experts, added to the residual."""
    num, inner, top_k = config.num_experts, config.intermediate_size, config.top_k

    def tensors() -> tuple[Tensor, ...]:
        gate_up = place.noise(3, num, 2 * inner, hidden, scale=hidden**-0.5)
        down = place.noise(4, num, hidden, inner, scale=inner**-0.5)
        router = place.noise(5, num, hidden, scale=hidden**-0.5)
        return (
            place.noise(1, rows, hidden),
            place.noise(2, hidden, scale=0.1, around=1),
            router,
            gate_up,
            down,
        )

    def build(ops: Any) -> Call:
        residual, norm, router, gate_up, down = tensors()
        packed = ops.pack(router), ops.pack_experts(gate_up, num), ops.pack_experts(down, num)

        def call(chosen: Tensor | None) -> Tensor:
            into = residual if chosen is None else residual[chosen]
            ops.experts(into, norm, EPS, *packed, top_k, config.renormalise, None)
            return into

        return call

    def plain() -> Callable[[], Any]:
        residual, norm, router, gate_up, down = tensors()

        def call() -> Tensor:
            x = F.rms_norm(residual, (hidden,), norm, EPS)
            weights, ids = F.linear(x, router).float().softmax(-1).topk(top_k)
            gate, up = torch.bmm(gate_up[ids.flatten()], _repeated(x, top_k)).squeeze(2).chunk(2, dim=-1)
            mixed = torch.bmm(down[ids.flatten()], (F.silu(gate) * up).unsqueeze(2)).view(rows, top_k, hidden)
            return residual.add_((mixed * weights.to(place.dtype).unsqueeze(2)).sum(1))

        return call

    used = num * (1 - (1 - top_k / num) ** rows)
    moved = place.bytes(int(used * 3 * inner * hidden), num * hidden, 2 * rows * hidden)
    flops = 2 * rows * (3 * top_k * inner + num) * hidden
    small = rows * top_k <= GATHERED_PAIRS
    return Case(f"experts {num}x{inner}", rows, build, plain if small else None, moved, flops)


def sampling(rows: int, vocab: int, place: Place) -> Case:
    """Temperature, top-k and top-p, of which every row has its own request's; logits are copied before."""

    def tensors() -> tuple[Tensor, SamplingTable]:
        table = SamplingTable.empty(rows, vocab, place.device)
        table.temperature.fill_(0.8)
        table.top_k.fill_(40)
        table.top_p.fill_(int(0.95 * WHOLE))
        keys = [request_key(seed) for seed in range(rows)]
        table.key.copy_(torch.tensor(keys, dtype=torch.int64))
        wide = Place(place.device, torch.float32)
        return wide.noise(1, rows, vocab, scale=4), table

    def arguments(chosen: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        every = torch.arange(rows, dtype=torch.int32, device=place.device)
        slots = every if chosen is None else every[chosen]
        zeros = torch.zeros_like(slots)
        return slots, slots + 5, torch.zeros(1, dtype=torch.int64, device=place.device), zeros, zeros

    def build(ops: Any) -> Call:
        logits, table = tensors()
        whole = arguments(None)

        def call(chosen: Tensor | None) -> Tensor:
            if chosen is None:
                return choose(logits.clone(), *whole, table)
            return choose(logits[chosen], *arguments(chosen), table)

        return call

    def plain() -> Callable[[], Any]:
        logits, _ = tensors()

        def call() -> Tensor:
            ordered, tokens = (logits / 0.8).topk(min(40, vocab))
            shares = ordered.softmax(-1)
            kept = shares.masked_fill(shares.cumsum(-1) - shares >= 0.95, 0.0)
            noise = torch.empty_like(kept).exponential_()
            return tokens.gather(1, (kept / noise).argmax(-1, keepdim=True))

        return call

    def judge(tokens: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        logits, table = tensors()
        return choose_reference(logits[chosen], *arguments(chosen), table).float(), tokens.float()

    return Case(f"choose {vocab}", rows, build, plain, 2 * 4 * rows * vocab, 0, judge)


def _repeated(x: Tensor, times: int) -> Tensor:
    """[T, H] -> [T times, H, 1], each row so many times."""
    return x.repeat_interleave(times, 0).unsqueeze(2)


def _int32(values: np.ndarray, place: Place) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(place.device)
