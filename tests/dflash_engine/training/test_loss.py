"""Weights, gradients and learning rates, against autograd and formulas written down plainly."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from dflash_engine.training.config import LossConfig, OptimizerConfig
from dflash_engine.training.draft_weights import Layout
from dflash_engine.training.loss import acceptance_weights, block_losses, chunk_blocks, weigher
from dflash_engine.training.optimizer import Optimizer, orthogonalised, rate

BLOCKS, PLACES, WIDTH, VOCAB = 6, 4, 16, 50


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BLOCKS, PLACES, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (BLOCKS, PLACES), generator=generator)
    # Some labels are what the draft says, so that something is right.
    said = (hidden @ head.T).argmax(-1)
    labels[::2, :2] = said[::2, :2]
    return hidden, head, labels, torch.tensor([4, 3, 2, 1, 0, 4])


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("chunk", [1, 2, 6])
def test_loss_and_gradient_are_those_of_autograd(kind: str, chunk: int):
    hidden, head, labels, lefts = batch()
    config = LossConfig(kind=kind, gamma=2.0)
    losses = block_losses(hidden, head, labels, lefts, weigher(config, 5, hidden.device), chunk)
    leaf = hidden.clone().requires_grad_()
    each = F.cross_entropy((leaf @ head.T).flatten(0, 1), labels.flatten(), reduction="none")
    each = each.view(BLOCKS, PLACES)
    counts = torch.arange(PLACES) < lefts[:, None]
    if kind == "decay":
        weights = torch.exp(-torch.arange(PLACES) / 2.0) * counts
    else:
        confidence = 0.5 * (-each.detach()).exp() + 0.5
        weights = torch.zeros(BLOCKS, PLACES, dtype=torch.float64)
        for block in range(BLOCKS):
            for place in range(int(lefts[block])):
                for end in range(place, int(lefts[block])):
                    weights[block, place] += math.prod(confidence[block, : end + 1].tolist())
    total = (weights * each).sum()
    total.backward()
    assert torch.allclose(losses.total.double(), total.detach(), rtol=1e-5)
    assert torch.allclose(losses.weight.double(), weights.double().sum(), rtol=1e-5)
    assert torch.allclose(losses.gradient, leaf.grad, atol=1e-5)


def test_blocks_count_as_reached_only_up_to_their_first_wrong_guess():
    hidden, head, labels, lefts = batch()
    losses = block_losses(hidden, head, labels, lefts, weigher(LossConfig(), 5, hidden.device), 3)
    right = (hidden @ head.T).argmax(-1) == labels
    expected = [0] * PLACES
    for block in range(BLOCKS):
        for place in range(int(lefts[block])):
            if not right[block, place]:
                break
            expected[place] += 1
    assert losses.reached.tolist() == expected and expected[0] > 0
    assert losses.offered.tolist() == [5, 4, 3, 2]


def test_acceptance_weights_move_on_once_a_position_is_sure():
    counts = torch.ones(1, 3)
    unsure = acceptance_weights(torch.log(torch.tensor([[0.01, 0.5, 0.5]])), counts, 0.5)
    sure = acceptance_weights(torch.log(torch.tensor([[0.99, 0.5, 0.5]])), counts, 0.5)
    assert (unsure.diff() < 0).all() and sure[0, 2] > 1.9 * unsure[0, 2]


def test_chunks_are_equal_and_within_the_limit():
    config = LossConfig(chunk_mib=64)
    blocks = chunk_blocks(config, 6144, 8, 49152, 2)
    assert 6144 % blocks == 0 and blocks * 7 * 49152 * 2 <= 64 << 20


def test_the_rate_rises_stays_and_falls():
    config = OptimizerConfig(warmup=0.1, decay=0.5)
    rates = [rate(config, step, 100) for step in range(100)]
    assert rates[0] == 0.1 and rates[9:50] == [1.0] * 41
    assert all(later < earlier for earlier, later in pairwise(rates[50:]))
    assert rates[-1] < 0.01


def test_adamw_steps_are_torchs_own():
    layout = Layout({"a": (4, 3), "norm": (5,)})
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(layout.size, generator=generator)
    expected = torch.nn.Parameter(flat.clone())
    optimizer = Optimizer(OptimizerConfig(lr=0.01, clip=0.5), flat, layout)
    other = torch.optim.AdamW([expected], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(5):
        gradient = torch.randn(layout.size, generator=generator) * 10 ** (step - 3)
        optimizer.factor.fill_(1 / (step + 1))
        optimizer.step(3 * gradient, torch.tensor(3.0))
        other.param_groups[0]["lr"] = 0.01 / (step + 1)
        expected.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([expected], 0.5)
        other.step()
        assert torch.allclose(flat, expected.detach(), atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 8, 24), (1, 24, 8)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(matrices).float())
    assert float(values.min()) > 0.5 and float(values.max()) < 1.4
