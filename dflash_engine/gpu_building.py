"""Builds what a GPU engine runs on: caches as large as memory allows, rounds, and their measured times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_engine import kv_cache
from dflash_engine.acceptance import Acceptance
from dflash_engine.calibration import Calibration, Limits
from dflash_engine.config import EngineConfig
from dflash_engine.device_round import DeviceRound
from dflash_engine.draft_policy import DraftPolicy
from dflash_engine.gguf_file import cache_folder
from dflash_engine.gpu_runner import GpuRunner
from dflash_engine.grammars import Grammars
from dflash_engine.graphs import Graphs
from dflash_engine.kv_cache import Caches, KVCache
from dflash_engine.models.draft import DraftModel
from dflash_engine.models.target import TargetModel
from dflash_engine.random_weights import SimulatedAcceptance
from dflash_engine.round_layout import RoundLayout, Shape, bucket
from dflash_engine.runner import Runner
from dflash_engine.shard import ALONE, Rank
from dflash_engine.slots import SlotTable
from dflash_engine.step_budget import PromptLimit
from dflash_engine.step_times import StepTimes, TimesKey

logger = logging.getLogger(__name__)

GRAPH_BYTES = 1 << 30
"""Kept free for captured graphs and for what the allocator cannot use."""
PROMPT_SLOWDOWN = 2.0
"""How much longer than of one token a round may take because of prompts in it, while others decode."""
LEAST_CHUNK = 64

_Piece = Callable[[DeviceRound], None]


class Measuring(Protocol):
    def measure(self) -> StepTimes: ...


@dataclass(frozen=True, slots=True)
class GpuParts:
    """A runner and what the scheduler has to know of it."""

    runner: GpuRunner
    num_blocks: int
    policy: DraftPolicy | None
    prompt_limit: PromptLimit
    times: StepTimes | None = None


@dataclass(frozen=True, slots=True)
class Models:
    target: TargetModel
    draft: DraftModel | None
    dtype: torch.dtype
    device: torch.device


def build(
    config: EngineConfig,
    models: Models,
    limits: Limits,
    block_length: int,
    rank: Rank = ALONE,
    times_key: TimesKey | None = None,
    grammars: Grammars | None = None,
) -> GpuParts:
    """Raises `ConfigError` with the numbers where the KV caches do not fit.

    `times_key` says for what measured times hold; those of an earlier start with the same key are used;
    `grammars` are those of the rank that chooses.

    Of several ranks the first one measures, and the others have to follow it then.
    """
    layout = RoundLayout(limits.max_num_seqs, bucket(limits.max_step_tokens))
    positions = limits.max_model_len + 2 * block_length
    vocab = models.target.config.vocab_size
    max_blocks = -(-positions // config.kv_block_size)
    slots = SlotTable(limits.max_num_seqs, max_blocks, vocab, models.device)
    workspace = _workspace_bytes(config, models, slots, layout, block_length)
    shapes = [model.kv_shape for model in (models.target, models.draft) if model is not None]
    num_blocks = rank.agree(
        kv_cache.num_blocks(config, shapes, models.dtype, models.device, positions, workspace)
    )
    device_round, caches = _round(config, models, slots, layout, block_length, num_blocks)
    alone = rank.shard.size == 1
    on_host = Runner(models.target, models.draft, caches, block_length, models.device, grammars, alone)
    runner = GpuRunner(
        device_round,
        slots,
        layout,
        Graphs(models.device, enabled=config.cuda_graphs),
        on_host.execute,
        (models.target.share.num_heads, models.target.share.num_kv_heads),
        models.device,
        rank.followers,
    )
    if models.device.type != "cuda" or not rank.leads:  # the interpreter's times say nothing
        return GpuParts(runner, num_blocks, None, PromptLimit(limits.max_step_tokens))
    num_draft = block_length - 1 if models.draft is not None else 0
    calibration = Calibration(runner, limits, max_blocks, num_draft)
    calibration.warm_up()
    times = step_times(calibration, times_key)
    adaptive = models.draft is not None and config.verify == "adaptive"
    policy = DraftPolicy(times, Acceptance(block_length - 1), block_length) if adaptive else None
    limit = PromptLimit(_mixed(times.kinds["verify"].measured_s), calibration.attention_span())
    return GpuParts(runner, num_blocks, policy, limit, times)


def step_times(calibration: Measuring, key: TimesKey | None) -> StepTimes:
    """Measured, or kept from an earlier start."""
    if key is None:
        return calibration.measure()
    path = cache_folder() / "step-times" / f"{key.digest}.json"
    kept = StepTimes.load(path, key)
    if kept is None:
        kept = calibration.measure()
        kept.save(path, key)
    return kept


def _mixed(verify_s: dict[int, float]) -> int:
    """The most tokens of a pass that takes PROMPT_SLOWDOWN times as long as one of a single token."""
    most = PROMPT_SLOWDOWN * min(verify_s.values())
    return max([LEAST_CHUNK, *(size for size, seconds in verify_s.items() if seconds <= most)])


def _round(
    config: EngineConfig,
    models: Models,
    slots: SlotTable,
    layout: RoundLayout,
    block_length: int,
    num_blocks: int,
) -> tuple[DeviceRound, Caches]:
    def cache(model: TargetModel | DraftModel) -> KVCache:
        return KVCache(model.kv_shape, num_blocks, config.kv_block_size, models.dtype, models.device)

    draft_cache = cache(models.draft) if models.draft is not None else None
    caches = Caches(cache(models.target), draft_cache, num_blocks, config.kv_block_size)
    simulated = None
    if config.simulated_acceptance is not None and models.draft is not None:
        simulated = SimulatedAcceptance(config.simulated_acceptance, block_length, models.device)
    made = DeviceRound(
        models.target,
        models.draft,
        caches,
        slots,
        layout,
        block_length,
        models.dtype,
        models.device,
        simulated,
    )
    return made, caches


def _workspace_bytes(
    config: EngineConfig, models: Models, slots: SlotTable, layout: RoundLayout, block_length: int
) -> int:
    """Memory that the largest round takes beside weights and caches, and what graphs need."""
    if models.device.type != "cuda":
        return 0
    with torch.inference_mode():
        before = torch.cuda.memory_allocated(models.device)
        torch.cuda.reset_peak_memory_stats(models.device)
        probe, _ = _round(config, models, slots, layout, block_length, 1)
        for piece in _largest(layout, models.draft is not None):
            piece(probe)
        torch.cuda.synchronize(models.device)
        peak = torch.cuda.max_memory_allocated(models.device) - before
    del probe
    torch.cuda.empty_cache()
    return peak + GRAPH_BYTES


def _largest(layout: RoundLayout, drafting: bool) -> Sequence[_Piece]:
    """The largest pieces of a round; every row of them is padding."""
    num = layout.tokens
    shape = Shape(num, num, num, 1, 0, noise=False, full=0, taps=drafting)
    pieces: list[_Piece] = [lambda made: made.verify(shape)]
    if drafting:
        pieces += [lambda made: made.draft(bucket(layout.rows), False), lambda made: made.context(num)]
    return pieces
