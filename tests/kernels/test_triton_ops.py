"""The GPU kernels against the torch reference: in Triton's interpreter, and on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import attention as attention_module
from kernels.attention import tokens_per_tile
from kernels.noise import request_key
from kernels.reference import ReferenceOps
from kernels.triton_ops import Tiling, TritonOps
from tests.helpers import assert_close

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, F32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 1e-2, F32: 2e-6}
"""RMS ratios: one rounding to bfloat16 is 1.7e-3; the reference rounds gate and up too, and normed rows."""
BLOCK = 4
ROWS = [1, 17, 70] if DEVICE.type == "cpu" else [1, 5, 16, 17, 33, 64, 65, 130, 300]

Run = Callable[[Any, Tensor], Tensor]


def noise(seed: int, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(DEVICE, dtype)


def linears(dtype: torch.dtype, rows: int, width: int, out: int) -> dict[str, Run]:
    """Each linear of a layer on rows chosen by index."""
    x, residual = noise(1, rows, width, dtype=dtype), noise(2, rows, out, dtype=dtype)
    weight, pair = noise(3, out, width, dtype=dtype), noise(4, 2 * out, width, dtype=dtype, scale=0.3)
    bias, norm = noise(5, 2 * out, dtype=dtype), 1 + noise(6, width, dtype=dtype, scale=0.2)

    def add(ops: Any, chosen: Tensor, *, biased: bool = False) -> Tensor:
        total = residual[chosen]
        tap = torch.full((len(chosen), 3 * out), torch.nan, dtype=dtype, device=DEVICE)
        added = bias[:out] if biased else None
        ops.add_linear(total, x[chosen], ops.pack(weight), added, tap[:, out : 2 * out])
        assert torch.equal(tap[:, out : 2 * out], total)
        assert bool(tap[:, :out].isnan().all()) and bool(tap[:, 2 * out :].isnan().all())
        return total

    return {
        "linear": lambda ops, chosen: ops.linear(x[chosen], ops.pack(weight)),
        "linear with bias": lambda ops, chosen: ops.linear(x[chosen], ops.pack(weight), bias[:out]),
        "add_linear": add,
        "add_linear with bias": lambda ops, chosen: add(ops, chosen, biased=True),
        "gate_up": lambda ops, chosen: ops.gate_up(x[chosen], norm, 1e-5, ops.pack(pair.clone(), norm), None),
        "gate_up with bias": lambda ops, chosen: ops.gate_up(
            x[chosen], norm, 1e-5, ops.pack(pair.clone(), norm), bias
        ),
        "logits": lambda ops, chosen: ops.logits(x[chosen], norm, 1e-5, ops.pack(weight)),
        "rms_norm": lambda ops, chosen: ops.rms_norm(x[chosen], norm, 1e-5),
    }


def qkv(
    dtype: torch.dtype, rows: int, width: int, heads: int, kv_heads: int, head_dim: int, *, normed: bool
) -> Run:
    """q of the rows and what stands at their slots in the two caches, side by side."""
    x, norm = noise(1, rows, width, dtype=dtype), 1 + noise(2, width, dtype=dtype, scale=0.2)
    weight = noise(3, (heads + 2 * kv_heads) * head_dim, width, dtype=dtype)
    bias = None if normed else noise(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norms = [1 + noise(seed, head_dim, dtype=dtype, scale=0.2) if normed else None for seed in (5, 6)]
    place = places(rows, head_dim)

    def run(ops: Any, chosen: Tensor) -> Tensor:
        caches = empty_caches(place["slots"], kv_heads, head_dim, dtype)
        positions, slots = place["positions"][chosen], place["slots"][chosen]
        query = ops.qkv(
            x[chosen],
            norm,
            1e-5,
            ops.pack(weight.clone(), norm),
            bias,
            heads,
            tuple(norms),
            place["rope"],
            positions,
            slots,
            *caches,
        )
        return torch.cat([query.flatten(1), *stored(caches, slots)], dim=1)

    return run


def places(rows: int, head_dim: int) -> dict[str, Any]:
    order = torch.Generator().manual_seed(4)
    positions = torch.randint(0, 300, (rows,), generator=order, dtype=torch.int32)
    slots = torch.randperm((-(-rows // BLOCK) + 2) * BLOCK, generator=order)[:rows]
    angles = torch.outer(torch.arange(300.0), 10_000 ** (-torch.arange(0, head_dim, 2) / head_dim))
    rope = (angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    return {"positions": positions.to(DEVICE), "slots": slots.to(DEVICE), "rope": rope}


def empty_caches(
    slots: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype, layers: int = 0
) -> list[Tensor]:
    blocks = int(slots.max()) // BLOCK + 1
    shape = (*([layers] if layers else []), blocks, BLOCK, kv_heads, head_dim)
    return [torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]


def stored(caches: list[Tensor], slots: Tensor) -> list[Tensor]:
    """What was written, per row; nothing else may have been."""
    for cache in caches:
        rest = cache.numel() - len(slots) * cache.shape[-1] * cache.shape[-2]
        assert int(cache.isnan().sum()) == rest
    return [cache.flatten(0, 1)[slots].flatten(1) for cache in caches]


def context(dtype: torch.dtype, rows: int) -> Run:
    """Keys and values of two draft layers at the rows' slots."""
    width, kv_heads, head_dim, layers = 48, 2, 32, 2
    features, fc = noise(1, rows, 80, dtype=dtype), noise(2, width, 80, dtype=dtype)
    norm, k_norms = (
        1 + noise(3, width, dtype=dtype, scale=0.2),
        1 + noise(4, layers, head_dim, dtype=dtype, scale=0.2),
    )
    kv = noise(5, layers * 2 * kv_heads * head_dim, width, dtype=dtype)
    place = places(rows, head_dim)

    def run(ops: Any, chosen: Tensor) -> Tensor:
        positions, slots = place["positions"][chosen], place["slots"][chosen]
        caches = empty_caches(place["slots"], kv_heads, head_dim, dtype, layers)
        packed = ops.pack(fc), ops.pack(kv.clone(), norm)
        ops.context(
            features[chosen],
            packed[0],
            norm,
            1e-6,
            packed[1],
            None,
            k_norms,
            place["rope"],
            positions,
            slots,
            *caches,
        )
        return torch.cat(
            [part for layer in zip(*caches, strict=True) for part in stored(list(layer), slots)], dim=1
        )

    return run


SEGMENTS = ((0, 3), (70, 8), (130, 1), (5, 1), (37, 21))
LONG = ((300, 2), (560, 1))


def attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    causal: bool = True,
    parts: bool = False,
    segments: tuple[tuple[int, int], ...] = SEGMENTS,
) -> tuple[Run, int]:
    """Sequences in scattered blocks; what no row of a sequence may see is NaN in both caches."""
    order = torch.Generator().manual_seed(5)
    last = max(start + rows for start, rows in segments)
    per_sequence = -(-last // BLOCK)
    tables = (
        torch.randperm(per_sequence * len(segments), generator=order).int().view(len(segments), -1).to(DEVICE)
    )
    shape = (per_sequence * len(segments), BLOCK, kv_heads, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    ranges = []
    for index, (start, rows) in enumerate(segments):
        for position in range(start, start + rows):
            first = 0 if window is None else max(position - window + 1, 0)
            ranges.append((index, first, position + 1 if causal else start + rows))
        seen = torch.arange(min(first for at, first, _ in ranges if at == index), start + rows, device=DEVICE)
        slots = tables[index].long()[seen // BLOCK] * BLOCK + seen % BLOCK
        for seed, cache in enumerate(caches):
            cache.flatten(0, 1)[slots] = noise(
                6 + seed + 2 * index, len(seen), kv_heads, head_dim, dtype=dtype
            )
    row_seq, begin, end = torch.tensor(ranges, dtype=torch.int32, device=DEVICE).T.contiguous()
    query = noise(8, len(ranges), heads, head_dim, dtype=dtype)

    def run(ops: Any, chosen: Tensor) -> Tensor:
        sequences = row_seq[chosen].tolist()
        bounds = [at for at in range(len(sequences)) if at == 0 or sequences[at] != sequences[at - 1]]
        counts = [after - at for at, after in zip(bounds, [*bounds[1:], len(sequences)], strict=True)]
        tokens = tokens_per_tile(max(counts), heads // kv_heads)
        tiles = [
            (at + piece, min(tokens, count - piece))
            for at, count in zip(bounds, counts, strict=True)
            for piece in range(0, count, tokens)
        ]
        tiling = Tiling(
            torch.tensor([*tiles, (0, 0)], dtype=torch.int32, device=DEVICE),
            tokens,
            -(-last // attention_module.SPLIT) + 1 if parts else 0,
        )
        indices = (index[chosen] for index in (row_seq, begin, end))
        return ops.attention(query[chosen], *caches, tables, *indices, tiling)

    return run, len(ranges)


def cases(dtype: torch.dtype, rows: int) -> dict[str, Run]:
    found = linears(dtype, rows, 48, 33) | {
        f"{name} of 320 to 80": run
        for name, run in linears(dtype, rows, 320, 80).items()
        if rows in (5, 70, 130)
    }
    for normed in (False, True):
        found[f"qkv of 64, normed {normed}"] = qkv(dtype, rows, 48, 3, 1, 64, normed=normed)
    found["qkv of 16"] = qkv(dtype, rows, 64, 4, 2, 16, normed=False)
    found["context"] = context(dtype, rows)
    return found


def attention_cases(dtype: torch.dtype) -> dict[str, tuple[Run, int]]:
    return {
        "grouped": attention(dtype, 6, 2, 16),
        "not causal": attention(dtype, 4, 2, 32, causal=False),
        "window": attention(dtype, 2, 2, 16, window=20),
        "window of one": attention(dtype, 4, 1, 16, window=1, segments=((0, 3), (9, 1))),
        "long": attention(dtype, 2, 1, 16, segments=LONG),
    }


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("rows", ROWS)
def test_layer_kernels_compute_what_the_reference_does_row_by_row(dtype, rows):
    ours, reference = TritonOps(DEVICE), ReferenceOps(16)
    for name, run in cases(dtype, rows).items():
        every = torch.arange(rows, device=DEVICE)
        together = run(ours, every)
        assert_close(name, run(reference, every), together, TOLERANCE[dtype])
        for chosen in (every[-1:], every.flip(0)[: rows // 2 + 1]):
            assert torch.equal(run(ours, chosen), together[chosen]), f"{name}: rows {chosen.tolist()}"


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_attention_computes_what_the_reference_does_row_by_row(dtype):
    ours, reference = TritonOps(DEVICE), ReferenceOps(16)
    for name, (run, rows) in attention_cases(dtype).items():
        every = torch.arange(rows, device=DEVICE)
        together = run(ours, every)
        assert_close(name, run(reference, every), together, TOLERANCE[dtype])
        for chosen in (every[-1:], every[:1], every[1::2]):
            assert torch.equal(run(ours, chosen), together[chosen]), f"{name}: rows {chosen.tolist()}"


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_attention_in_many_programs_gives_the_bits_of_one(dtype):
    ours = TritonOps(DEVICE)
    for window in (None, 270):
        one, rows = attention(dtype, 2, 1, 16, window=window, segments=LONG)
        many, _ = attention(dtype, 2, 1, 16, window=window, segments=LONG, parts=True)
        every = torch.arange(rows, device=DEVICE)
        assert torch.equal(one(ours, every), many(ours, every))


@pytest.mark.parametrize("rows", ROWS)
def test_the_best_token_is_that_of_the_logits(rows):
    ours = TritonOps(DEVICE)
    x, norm, weight = (
        noise(1, rows, 64, dtype=BF16),
        1 + noise(2, 64, dtype=BF16),
        noise(3, 200, 64, dtype=BF16),
    )
    weight[150] = weight[20]
    logits = ours.logits(x, norm, 1e-5, weight)
    best = ours.best(x, norm, 1e-5, weight, None)
    assert torch.equal(best.long(), logits.argmax(-1))
    assert 150 not in best.tolist()


@pytest.mark.parametrize("rows", ROWS)
def test_the_best_token_with_noise_is_the_references_and_that_of_the_row_alone(rows):
    ours, reference = TritonOps(DEVICE), ReferenceOps(16)
    x, norm, weight = noise(1, rows, 64), 1 + noise(2, 64, scale=0.2), noise(3, 200, 64, scale=0.1)
    order = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    slots, positions = order % 3 - 1, 7 * order  # slot -1 is padding, slot 0 has no noise
    temperature = torch.tensor([0.0, 0.9], device=DEVICE)
    keys = torch.tensor([request_key(seed) for seed in (3, 11)], device=DEVICE)
    drawn = (slots, positions, temperature, keys)
    best = ours.best(x, norm, 1e-5, weight, drawn)
    assert torch.equal(best, reference.best(x, norm, 1e-5, reference.pack(weight), drawn))
    if rows > 1:
        assert not torch.equal(best, ours.best(x, norm, 1e-5, weight, None))
    last = (slots[-1:], positions[-1:], temperature, keys)
    assert torch.equal(ours.best(x[-1:], norm, 1e-5, weight, last), best[-1:])


@pytest.mark.parametrize("name", ["add_linear", "gate_up"])
def test_shapes_that_do_not_fit_are_refused(name):
    ops = TritonOps(DEVICE)
    x, weight = noise(1, 3, 64), noise(2, 32, 64)
    if name == "add_linear":
        with pytest.raises(ValueError, match="out is"):
            ops.add_linear(noise(3, 3, 31), x, weight, None)
    else:
        with pytest.raises(ValueError, match="weight is"):
            ops.gate_up(x, noise(3, 64), 1e-5, weight[:, :63], None)
