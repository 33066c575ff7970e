"""The noise of sampling: Gumbel, and nobody else's."""

from __future__ import annotations

import math

import torch

from dflash_engine.choose import gumbel_noise

CPU = torch.device("cpu")


def test_noise_is_gumbel_and_seeds_positions_and_tokens_share_none() -> None:
    size = 1 << 16
    keys = [
        *((7, position) for position in range(6)),
        *((seed, 3) for seed in (0, 1, 2, 6, 8, 31, 7 + 2**32, 7 + 2**62, 2**63 - 1)),
    ]
    noise = torch.stack([gumbel_noise(seed, position, size, CPU) for seed, position in keys]).double()
    assert noise.isfinite().all()
    assert (noise.mean(1) - 0.5772156649).abs().max() < 5 * math.sqrt(math.pi**2 / 6 / size)
    assert (noise.var(1) - math.pi**2 / 6).abs().max() < 0.06
    for quantile in (0.01, 0.1, 0.5, 0.9, 0.99):
        share = (noise < -math.log(-math.log(quantile))).double().mean(1)
        assert (share - quantile).abs().max() < 5 * math.sqrt(quantile * (1 - quantile) / size)
    uniform = torch.exp(-torch.exp(-noise)) - 0.5
    limit = 5 / math.sqrt(size)
    for shift in (0, 1, 2, 3, 31, 256):
        correlations = uniform @ uniform.roll(shift, dims=1).T * 12 / size
        if shift == 0:
            correlations -= torch.diag(correlations.diag())
        assert correlations.abs().max() < limit, shift


def test_no_two_positions_and_no_two_near_seeds_have_the_same_noise() -> None:
    seeds = [*range(400), *(2**32 * high for high in range(1, 400)), *(2**63 - 1 - low for low in range(400))]
    keys = [*((5, position) for position in range(3000)), *((seed, 0) for seed in seeds if seed != 5)]
    seen = {tuple(gumbel_noise(seed, position, 4, CPU).tolist()) for seed, position in keys}
    assert len(seen) == len(keys)


def test_a_larger_vocabulary_leaves_the_noise_of_its_first_tokens() -> None:
    assert torch.equal(gumbel_noise(3, 9, 1000, CPU)[:50], gumbel_noise(3, 9, 50, CPU))
