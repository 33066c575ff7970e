"""Cross-entropy of drafted tokens under the target's frozen head, with its gradient, in chunks.

The logits of a step would be gigabytes; each chunk's are made, turned into their gradient and dropped. So
the gradient of the hidden states comes without autograd, and nothing of the vocabulary's width is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_engine.training.config import LossConfig

Weigh = Callable[[Tensor, Tensor], Tensor]
"""Log probabilities of the labels and which of them count, [n, B - 1] each -> weights [n, B - 1]."""


def weigher(config: LossConfig, block_size: int, device: torch.device) -> Weigh:
    """How much each position of a block counts."""
    if config.kind == "decay":
        decay = torch.exp(-torch.arange(block_size - 1, device=device) / config.gamma)
        return lambda logprobs, counts: decay * counts
    return lambda logprobs, counts: acceptance_weights(logprobs, counts, config.alpha)


def acceptance_weights(logprobs: Tensor, counts: Tensor, alpha: float) -> Tensor:
    """D-PACE: w_j = sum over m >= j of prod over i <= m of q_i, where q_i = (1 - alpha) p_i + alpha.

    p_i is the draft's probability of the right token, so the product is the chance that a block gets as
    far as m, and w_j what is lost when position j is wrong. No gradient goes through the weights.
    """
    confidence = (1 - alpha) * logprobs.exp() + alpha
    reach = confidence.cumprod(-1) * counts
    return reach.flip(-1).cumsum(-1).flip(-1) * counts


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Of one step."""

    gradient: Tensor
    """Of the weighted sum, with respect to the hidden states, in their dtype: [n, B - 1, H]."""
    weight: Tensor
    """Sum of all weights, to divide by; float32."""
    total: Tensor
    """Weighted sum of the cross-entropies; float32."""
    reached: Tensor
    """[B - 1]: blocks whose first k guesses are all right."""
    offered: Tensor
    """[B - 1]: blocks that have a k-th label."""


def chunk_losses(
    hidden: Tensor, head: Tensor, labels: Tensor, lefts: Tensor, weigh: Weigh
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Losses` for hidden [n, B - 1, H], head [V, H], labels int64 [n, B - 1] and how many of
    them each block has, lefts [n]."""
    rows = hidden.flatten(0, 1)
    logits = rows @ head.T
    flat = labels.flatten()
    scores = logits.float()
    top = scores.amax(-1)
    exps = (scores - top[:, None]).exp()
    sums = exps.sum(-1)
    right = logits.gather(1, flat[:, None]).squeeze(1).float()
    logprobs = (right - top - sums.log()).view(labels.shape)
    counts = (torch.arange(labels.shape[1], device=labels.device) < lefts[:, None]).float()
    weights = weigh(logprobs, counts)
    each = weights.flatten()
    columns = torch.arange(head.shape[0], device=head.device)
    slopes = exps * (each / sums)[:, None] - each[:, None] * (columns == flat[:, None])
    gradient = (slopes.to(head.dtype) @ head).view(hidden.shape)
    reached = ((right >= top).view(labels.shape) * counts).cumprod(-1).sum(0)
    return gradient, weights.sum(), -(weights * logprobs).sum(), reached, counts.sum(0)


ChunkLosses = Callable[[Tensor, Tensor, Tensor, Tensor, Weigh], tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]


def block_losses(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    lefts: Tensor,
    weigh: Weigh,
    chunk_blocks: int,
    each_chunk: ChunkLosses = chunk_losses,
) -> Losses:
    """Of all blocks, `chunk_blocks` at a time; see `chunk_losses` for the shapes."""
    parts = []
    for at in range(0, len(hidden), chunk_blocks):
        some = slice(at, at + chunk_blocks)
        parts.append(each_chunk(hidden[some], head, labels[some], lefts[some], weigh))
    gradients, *sums = zip(*parts, strict=True)
    weight, total, reached, offered = (torch.stack(part).sum(0) for part in sums)
    return Losses(torch.cat(gradients), weight, total, reached, offered)


def chunk_blocks(config: LossConfig, num_blocks: int, block_size: int, vocab: int, itemsize: int) -> int:
    """Blocks of a chunk: equal chunks, each within `chunk_mib`."""
    most = max((config.chunk_mib << 20) // (vocab * (block_size - 1) * itemsize), 1)
    chunks = -(-num_blocks // most)
    while num_blocks % chunks:
        chunks += 1
    return num_blocks // chunks
