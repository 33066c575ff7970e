"""The draft in training against the draft that the engine runs: the same weights give the same guesses."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dflash_engine.batching import Segment, forward_batch
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.kv_cache import KVCache
from dflash_engine.model_config import DraftConfig
from dflash_engine.models.draft import DraftModel, draft_linears
from dflash_engine.ops import Sizes, choose_ops
from dflash_engine.training.checks import TrainingCheckFailed
from dflash_engine.training.draft_forward import draft_hidden
from dflash_engine.training.packing import PackedRows
from dflash_engine.training.step import DeviceRows, TrainStep

KV_BLOCK = 16
CLOSE = {torch.float32: 2e-3, torch.bfloat16: 0.06}
"""RMS of the difference as a part of the hidden states; bfloat16 rounds in other places."""


class WeightsAtHand(Checkpoint):
    """Tensors in memory instead of in a folder."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self._tensors[name]
        assert list(tensor.shape) == list(shape), name
        return tensor.detach().clone()

    def finish(self, ignore: Collection[str] = ()) -> None:
        """Nothing is left over: the names are those of the layout."""


def engine_hidden(
    config: DraftConfig, weights: Mapping[str, Tensor], features: Tensor, embedded: Tensor, length: int
) -> Tensor:
    """Normed hidden states [B, H] of one block embedded [B, H] behind the context features [T, F]."""
    device, dtype = features.device, features.dtype
    threads = torch.get_num_threads()
    sizes = Sizes(draft_linears(config), (config.head_dim,))
    ops = choose_ops("auto", device, dtype, os.cpu_count() or 1, sizes, exact=False)
    model = DraftModel(config, WeightsAtHand(weights), ops, dtype, device, length)
    torch.set_num_threads(threads)
    end = len(features) + len(embedded)
    table = range(-(-end // KV_BLOCK))
    cache = KVCache(model.kv_shape, len(table), KV_BLOCK, dtype, device)
    cells = torch.arange(len(features), device=device)
    if len(features):
        model.write_context(features, cells.int(), cells, cache)
    hidden = embedded.clone()
    block = Segment(len(features), len(embedded), table)
    model.forward(hidden, forward_batch([block], model.spans, KV_BLOCK, device, config.group), cache)
    return ops.rms_norm(hidden, model.norm, config.rms_norm_eps)


@torch.no_grad()
def check_engine(step: TrainStep, rows: PackedRows, features: Tensor) -> float:
    """Compares some blocks of the first sequence with features [S, F]; gives the largest difference.

    Raises `TrainingCheckFailed`: engine_disagrees.
    """
    row, first, length, prompt, _ = rows.sequences[0]
    assert row == 0
    device = step.features.device
    columns = np.unique(np.linspace(first + prompt, first + length - 2, 4).astype(np.int64))
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    anchors = torch.from_numpy(columns)[None].to(device)
    blocks, _ = step.maker.make(
        DeviceRows.of(rows.part(np.arange(1)), device), numbers, anchors, features[None]
    )
    weights = step.weights()
    trained = draft_hidden(weights, step.config, blocks)[0]
    worst = 0.0
    for place, column in enumerate(columns):
        context = features[first:column].contiguous()
        block = blocks.embedded[0, place]
        served = engine_hidden(step.config, weights, context, block, rows.row_tokens + len(block))[1:].float()
        difference = (served - trained[place].float()).square().mean().sqrt() / served.square().mean().sqrt()
        worst = max(worst, float(difference))
    if worst > CLOSE[features.dtype]:
        raise TrainingCheckFailed(
            "engine_disagrees",
            f"the engine's draft and the one in training differ by {worst:.1%} on the same features: a mask, "
            "a position or a weight is not where the engine has it",
        )
    return worst
