"""Changes the flat weights by a flat gradient, with nothing that asks the device for a number."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from dflash_engine.training.config import OptimizerConfig
from dflash_engine.training.draft_weights import Layout

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that Muon uses (Keller Jordan, 2024)."""
NEWTON_SCHULZ_STEPS = 5
EPS = 1e-8


def rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Factor of the learning rate in a step, counted from 0: linear warm-up, flat, cosine to zero."""
    warmup = max(round(config.warmup * steps), 1)
    decay = max(round(config.decay * steps), 1)
    left = steps - step
    rising = min((step + 1) / warmup, 1.0)
    if left >= decay:
        return rising
    return rising * 0.5 * (1 - math.cos(math.pi * left / decay))


class Optimizer:
    """AdamW (arXiv 1711.05101) without decay on the flat vector; with `muon`, the matrices go by the
    orthogonalised momentum instead, those of one shape in one batch of products."""

    def __init__(self, config: OptimizerConfig, flat: Tensor, layout: Layout) -> None:
        self._config = config
        self._flat = flat
        self._layout = layout
        self.mean = torch.zeros_like(flat)
        self.square = torch.zeros_like(flat)
        device = flat.device
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        """Steps made; on the device, since it is part of a captured graph."""
        self.factor = torch.ones((), dtype=torch.float32, device=device)
        """Of the learning rate: set it before each step."""
        self._groups: list[list[str]] = []
        if config.kind == "muon":
            by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
            for name, shape in layout.shapes.items():
                if len(shape) == 2:
                    by_shape[shape].append(name)
            self._groups = list(by_shape.values())

    @property
    def state(self) -> dict[str, Tensor]:
        """To be saved, and copied into."""
        return {"mean": self.mean, "square": self.square, "count": self.count}

    @torch.no_grad()
    def step(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Uses up the summed gradient [N], which is divided by `weight` and clipped; returns its norm."""
        gradient.div_(weight.clamp_min(1e-12))
        norm: Tensor = torch.linalg.vector_norm(gradient)
        gradient.mul_((self._config.clip / norm.clamp_min(1e-12)).clamp_max(1.0))
        first, second = self._config.betas
        self.count.add_(1)
        self.mean.lerp_(gradient, 1 - first)
        self.square.lerp_(gradient.square(), 1 - second)
        corrected = (self.square / (1 - second**self.count)).sqrt_().add_(EPS)
        update = self.mean / (1 - first**self.count) / corrected * (self.factor * self._config.lr)
        views = self._layout.views(update)
        for name, change in self._orthogonal(gradient):
            views[name].copy_(change)
        self._flat.sub_(update)
        return norm

    def _orthogonal(self, gradient: Tensor) -> list[tuple[str, Tensor]]:
        """Muon's changes of the matrices, by Nesterov's momentum of which `mean` is the part so far."""
        changes: list[tuple[str, Tensor]] = []
        gradients, means = self._layout.views(gradient), self._layout.views(self.mean)
        for names in self._groups:
            momentum = torch.stack([means[name] for name in names])
            ahead = torch.stack([gradients[name] for name in names]).lerp(momentum, self._config.betas[0])
            scale = self.factor * self._config.muon_lr * max(1.0, ahead.shape[1] / ahead.shape[2]) ** 0.5
            changes += zip(names, orthogonalised(ahead).float() * scale, strict=True)
        return changes


def orthogonalised(matrices: Tensor) -> Tensor:
    """[n, P, Q] -> about the nearest matrices with singular values of one, in bfloat16."""
    first, second, third = NEWTON_SCHULZ
    wide = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if wide else matrices
    size = torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    x = (x / size).bfloat16()
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = first * x + (second * square + third * square @ square) @ x
    return x.mT if wide else x
