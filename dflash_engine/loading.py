"""Puts an engine together: finds and reads the models, sizes the caches, builds runner and scheduler."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_engine import kv_cache
from dflash_engine.batch_room import BatchShare, RoundTimes
from dflash_engine.calibration import Limits
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.config import EngineConfig
from dflash_engine.crew import Crew
from dflash_engine.devices import select_device
from dflash_engine.draft_policy import DraftPolicy
from dflash_engine.errors import ConfigError
from dflash_engine.fingerprint import Fingerprint, device_kind, triton_version, weights_digest
from dflash_engine.gpu_building import GpuParts, Models, build
from dflash_engine.grammars import Grammars, grammar_version
from dflash_engine.kv_cache import Caches, KVCache
from dflash_engine.leading import LeadingRunner
from dflash_engine.memory import MemoryReport, memory_report
from dflash_engine.model_config import DraftConfig, ModelConfig
from dflash_engine.models.draft import DraftModel, draft_linears
from dflash_engine.models.target import TargetModel, target_linears
from dflash_engine.observed_times import ObservedTimes
from dflash_engine.ops import DEVICE_OPS, Ops, Sizes, choose_ops, source_digest
from dflash_engine.pipeline import Executor, Launcher
from dflash_engine.random_weights import NoTokenizer, RandomCheckpoint
from dflash_engine.runner import Runner
from dflash_engine.scheduler import Scheduler
from dflash_engine.shard import ALONE, Rank
from dflash_engine.sources import Sources, find
from dflash_engine.step_budget import PromptLimit
from dflash_engine.step_times import TimesKey
from dflash_engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine core is made of."""

    tokenizer: Tokenizer | NoTokenizer
    grammars: Grammars
    scheduler: Scheduler
    runner: Executor | Launcher
    policy: DraftPolicy | None
    times: RoundTimes
    model: ModelConfig
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_length: int
    fingerprint: Fingerprint
    memory: MemoryReport


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models of one rank, and what follows from the device that they are on."""

    models: Models
    ops: Ops
    limits: Limits
    ahead: int
    length: int
    """Positions that are served."""


def load(config: EngineConfig) -> Parts:
    """Raises `ConfigError` in one sentence where the engine cannot start as asked."""
    sources = find(config)
    device = select_device(config, 0)
    if config.tensor_parallel_size == 1:
        return _load(config, sources, ALONE)
    crew = Crew(config, device)
    with crew.starting():
        return _load(config, sources, crew.rank)


def read_models(config: EngineConfig, sources: Sources, rank: Rank) -> Loaded:
    """The rank's part of the weights, on its device. Raises `ConfigError`."""
    device, dtype, shard = select_device(config, rank.shard.rank), getattr(torch, config.dtype), rank.shard
    threads = config.threads or os.cpu_count() or 1
    model, draft, block_length = sources.model, sources.draft, sources.block_length
    sizes = _sizes(shard.share(model), shard.share(draft) if draft is not None else None)
    ops = choose_ops(config.ops, device, dtype, threads, sizes, exact=config.exact, group=rank.group)
    if device.type == "cpu":
        # The compiled kernels have threads of their own, and torch's would spin in their way: with both,
        # a step took a fifth longer on 2 cores.
        torch.set_num_threads(1 if ops.name == "cpu" else threads)
    ahead = 1 if ops.name in DEVICE_OPS else 0
    _check_simulated(config, block_length, on_device=bool(ahead))
    length = sources.max_model_len + (1 + ahead) * block_length
    checkpoint = _checkpoint(config, sources.folder, device, 0)
    target_model = TargetModel(model, checkpoint, ops, dtype, device, length, shard)
    draft_model = None
    if draft is not None and sources.draft_folder is not None and block_length > 1:
        checkpoint = _checkpoint(config, sources.draft_folder, device, 1)
        draft_model = DraftModel(draft, checkpoint, ops, dtype, device, length, shard)
    limits = Limits(
        config.limit("max_num_seqs", device.type),
        config.limit("max_step_tokens", device.type),
        sources.max_model_len,
    )
    return Loaded(Models(target_model, draft_model, dtype, device), ops, limits, ahead, length)


def build_runner(
    config: EngineConfig,
    sources: Sources,
    loaded: Loaded,
    rank: Rank,
    fingerprint: Fingerprint | None = None,
    grammars: Grammars | None = None,
) -> GpuParts | HostParts:
    """Caches and a runner, once all ranks have their models; `grammars` for the rank that chooses.

    Raises `ConfigError`.
    """
    # From here on ranks wait for each other on the device, where no error reaches them.
    rank.agree(0)
    if loaded.ahead:
        key = _times_key(sources, loaded, fingerprint) if fingerprint is not None else None
        return build(config, loaded.models, loaded.limits, sources.block_length, rank, key, grammars)
    return _on_host(config, loaded.models, sources.block_length, loaded.length, rank, grammars)


def _load(config: EngineConfig, sources: Sources, rank: Rank) -> Parts:
    folder, model = sources.folder, sources.model
    loaded = read_models(config, sources, rank)
    models, ops, limits = loaded.models, loaded.ops, loaded.limits
    fingerprint = Fingerprint(
        weights=weights_digest(folder) if config.weights == "checkpoint" else "random",
        dtype=config.dtype,
        device=device_kind(models.device),
        kernels=f"{ops.name}-{ops.version}",
        tensor_parallel_size=config.tensor_parallel_size,
        torch=torch.__version__,
        triton=triton_version(),
        grammars=grammar_version(),
    )
    tokenizer = Tokenizer.load(folder) if config.weights == "checkpoint" else NoTokenizer()
    eos_token_ids = tuple(sorted({*model.eos_token_ids, *tokenizer.eos_token_ids}))
    grammars = Grammars(tokenizer, model.vocab_size, eos_token_ids)
    built = build_runner(config, sources, loaded, rank, fingerprint, grammars)
    used_draft = models.draft.share if models.draft is not None else None
    kv_tokens = built.num_blocks * config.kv_block_size
    times = built.times or ObservedTimes()
    memory = memory_report(models.target.share, used_draft, models.dtype, kv_tokens)
    _log(config, sources.draft_folder, ops, models.device, sources.block_length, memory)
    return Parts(
        tokenizer=tokenizer,
        grammars=grammars,
        scheduler=Scheduler(
            num_blocks=built.num_blocks,
            block_size=config.kv_block_size,
            max_num_seqs=limits.max_num_seqs,
            max_step_tokens=limits.max_step_tokens,
            prompt_limit=built.prompt_limit,
            max_model_len=sources.max_model_len,
            block_length=sources.block_length,
            prefix_caching=config.prefix_caching,
            rounds_ahead=loaded.ahead,
            draft_policy=built.policy,
            share=BatchShare(times, config.batch_slowdown),
            batch_starvation_s=config.batch_starvation_s,
        ),
        runner=built.runner,
        policy=built.policy,
        times=times,
        model=model,
        eos_token_ids=eos_token_ids,
        max_model_len=sources.max_model_len,
        block_length=sources.block_length,
        fingerprint=fingerprint,
        memory=memory,
    )


def _times_key(sources: Sources, loaded: Loaded, fingerprint: Fingerprint) -> TimesKey | None:
    """For what measured times hold; None where they are not worth keeping."""
    if fingerprint.weights == "random" or loaded.models.device.type != "cuda":
        return None
    draft = weights_digest(sources.draft_folder) if sources.draft_folder is not None else "none"
    limits = loaded.limits
    return TimesKey(
        model_digest=fingerprint.digest,
        gpu=torch.cuda.get_device_name(loaded.models.device),
        version=f"{source_digest()} {draft} {sources.block_length} {limits}",
    )


def _checkpoint(config: EngineConfig, folder: Path, device: torch.device, seed: int) -> Checkpoint:
    if config.weights == "checkpoint":
        return Checkpoint(folder)
    return RandomCheckpoint(device, getattr(torch, config.dtype), seed)


@dataclass(frozen=True, slots=True)
class HostParts:
    """A runner that has each step's result before the next one is planned."""

    runner: Executor
    num_blocks: int
    policy: DraftPolicy | None = None
    prompt_limit: PromptLimit | None = None
    times: RoundTimes | None = None


def _on_host(
    config: EngineConfig,
    models: Models,
    block_length: int,
    length: int,
    rank: Rank,
    grammars: Grammars | None,
) -> HostParts:
    parts = [part for part in (models.target, models.draft) if part is not None]
    dtype, device, size = models.dtype, models.device, config.kv_block_size
    shapes = [part.kv_shape for part in parts]
    num_blocks = rank.agree(kv_cache.num_blocks(config, shapes, dtype, device, length))
    pools = [KVCache(part.kv_shape, num_blocks, size, dtype, device) for part in parts]
    caches = Caches(pools[0], pools[1] if models.draft is not None else None, num_blocks, size)
    alone = rank.shard.size == 1
    runner: Executor = Runner(models.target, models.draft, caches, block_length, device, grammars, alone)
    return HostParts(runner if rank.followers is None else LeadingRunner(runner, rank.followers), num_blocks)


def _check_simulated(config: EngineConfig, block_length: int, *, on_device: bool) -> None:
    mean = config.simulated_acceptance
    if mean is None:
        return
    if not on_device:
        raise ConfigError("simulated_acceptance needs operations that choose on the device: ops triton")
    if mean > block_length > 1:
        raise ConfigError(f"simulated_acceptance {mean} is more than block_length {block_length}")


def _sizes(model: ModelConfig, draft: DraftConfig | None) -> Sizes:
    if draft is None:
        return Sizes(target_linears(model), (model.head_dim,))
    return Sizes((*target_linears(model), *draft_linears(draft)), (model.head_dim, draft.head_dim))


def _log(
    config: EngineConfig,
    draft: Path | None,
    ops: Ops,
    device: torch.device,
    block_length: int,
    memory: MemoryReport,
) -> None:
    logger.info(
        "%s with %s on %s in %s: %s operations, block length %d; %s",
        config.model,
        f"draft {draft.name}" if draft else "no draft",
        device,
        config.dtype,
        ops.name,
        block_length,
        memory,
    )
