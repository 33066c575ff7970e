"""What training a draft would cost: times measured at the shapes of a config, with random weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dflash_engine.machine import machine
from dflash_engine.model_config import DraftConfig
from dflash_engine.training.config import TrainConfig
from dflash_engine.training.corpus import Corpus, corpus_of
from dflash_engine.training.draft_weights import Layout, draft_config, initial, tensor_shapes
from dflash_engine.training.optimizer import Optimizer
from dflash_engine.training.packing import PackedRows, pack
from dflash_engine.training.plans import Planner
from dflash_engine.training.ranks import Ranks
from dflash_engine.training.step import WARM_STEPS, DeviceRows, TrainStep
from dflash_engine.training.target import Frozen, Target, find_target, read_frozen

TIMED_STEPS = 10
TIMED_GROUPS = 3


def estimate(
    config: TrainConfig, price_per_gpu_hour: float | None, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Seconds of a step and of the features, on one GPU, and what they make of the budget's steps.

    GPU-hours = (steps x step_s + corpus tokens / feature tokens per second) / 3600, where batch.rows are
    those of one GPU. Whatever the target's weights are, random ones take as long. Raises `ConfigError`.
    """
    config = config.model_copy(update={"weights": "random"})
    device = Ranks.find(config.run.device).device
    sources = find_target(config, device)
    draft = draft_config(config.draft, sources.model)
    frozen = read_frozen(config, sources, device)
    batch, row_tokens = config.batch, config.data.row_tokens
    rows = pack(_made_up(config, sources.model.vocab_size), row_tokens, draft.block_size, config.run.seed)
    step_s = _step_time(config, draft, frozen, rows)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    report({"event": "estimate", "step_s": step_s, "peak_bytes": peak})
    target = Target(config, sources, device)
    tokens_per_s = _feature_rate(target, rows, draft.target_layer_ids, frozen.head)
    report({"event": "estimate", "feature_tokens_per_s": tokens_per_s})
    answer: dict[str, Any] = {
        "target": config.target,
        "parameters": Layout(tensor_shapes(draft)).size,
        "step_s": step_s,
        "blocks_per_s": batch.rows * batch.anchors / step_s,
        "feature_tokens_per_s": tokens_per_s,
        "feature_bytes_per_token": len(draft.target_layer_ids)
        * draft.hidden_size
        * frozen.head.element_size(),
        "step_peak_bytes": peak,
        "machine": machine(),
    }
    steps = config.budget.steps
    if steps is not None:
        hours = steps * step_s / 3600
        if config.features.place == "recompute":
            hours += steps * batch.rows * row_tokens / tokens_per_s / 3600
        answer |= {"steps": steps, "gpu_hours": hours, "million_tokens_of_features_gpu_s": 1e6 / tokens_per_s}
        if price_per_gpu_hour is not None:
            answer["cost"] = hours * price_per_gpu_hour
    return answer


def _step_time(config: TrainConfig, draft: DraftConfig, frozen: Frozen, rows: PackedRows) -> float:
    device = frozen.head.device
    flat = initial(draft, frozen.final_norm, config.run.seed).to(device)
    shape = (config.batch.rows, config.batch.anchors, config.data.row_tokens)
    optimizer = Optimizer(config.optimizer, flat, Layout(tensor_shapes(draft)))
    step = TrainStep(draft, frozen, flat, optimizer, config.loss, config.run, shape)
    step.use(DeviceRows.of(rows, device))
    step.features.normal_()
    planner = Planner(rows.labels, shape[0], shape[1], (config.run.seed,))
    return _timed(lambda number: step.run(planner.plan(number), 0.0), WARM_STEPS + 1, TIMED_STEPS, device)


def _made_up(config: TrainConfig, vocab_size: int) -> Corpus:
    """Enough random sequences, a third of each a prompt, to fill the rows of a step and of a feature pass."""
    length = config.data.row_tokens
    num = max(config.batch.rows, config.features.batch_tokens // length + 1) + 1
    tokens = np.random.default_rng(0).integers(vocab_size, size=(num, length))
    cut = max(length // 3, 1)
    return corpus_of([(row[:cut].tolist(), row[cut:].tolist()) for row in tokens], vocab_size)


def _feature_rate(target: Target, rows: PackedRows, taps: tuple[int, ...], like: torch.Tensor) -> float:
    group = rows.arrays_of(np.arange(min(target.group_rows, rows.num_rows)))
    width = len(taps) * target.config.hidden_size
    out = torch.zeros((*group.tokens.shape, width), dtype=like.dtype, device=like.device)
    seconds = _timed(lambda number: target.features(group, taps, out), 1, TIMED_GROUPS, like.device)
    return group.tokens.size / seconds


def _timed(work: Callable[[int], object], warm: int, times: int, device: torch.device) -> float:
    """Seconds of one call."""
    for number in range(warm):
        work(number)
    _wait(device)
    begun = time.perf_counter()
    for number in range(warm, warm + times):
        work(number)
    _wait(device)
    return (time.perf_counter() - begun) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
