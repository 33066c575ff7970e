"""Puts an engine together: finds and reads the models, sizes the caches, builds runner and scheduler."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_engine import kv_cache
from dflash_engine.catalog import resolve_draft, resolve_model
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError
from dflash_engine.fingerprint import Fingerprint, device_kind, triton_version, weights_digest
from dflash_engine.model_config import DraftConfig, ModelConfig, read_draft_config, read_model_config
from dflash_engine.models.draft import DraftModel, draft_linears
from dflash_engine.models.target import TargetModel, target_linears
from dflash_engine.ops import Ops, Sizes, choose_ops
from dflash_engine.runner import Runner
from dflash_engine.scheduler import Scheduler
from dflash_engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine core is made of."""

    tokenizer: Tokenizer
    scheduler: Scheduler
    runner: Runner
    model: ModelConfig
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_length: int
    fingerprint: Fingerprint


def load(config: EngineConfig) -> Parts:
    """Raises `ConfigError` in one sentence where the engine cannot start as asked."""
    device, dtype = _device(config.device), getattr(torch, config.dtype)
    threads = config.threads or os.cpu_count() or 1
    folder = resolve_model(config.model)
    model = read_model_config(folder)
    draft_folder = resolve_draft(config.draft, config.model)
    draft = read_draft_config(draft_folder, model) if draft_folder else None
    block_length = _block_length(config, draft)
    max_model_len = _max_model_len(config, model)
    ops = choose_ops(config.ops, device, dtype, threads, _sizes(model, draft))
    if device.type == "cpu":
        # The compiled kernels have threads of their own, and torch's would spin in their way: with both,
        # a step took a fifth longer on 2 cores.
        torch.set_num_threads(1 if ops.name == "cpu" else threads)
    length = max_model_len + block_length
    target_model = TargetModel(model, Checkpoint(folder), ops, dtype, device, length)
    draft_model = None
    if draft is not None and draft_folder is not None and block_length > 1:
        draft_model = DraftModel(draft, Checkpoint(draft_folder), ops, dtype, device, length)
    shapes = [part.kv_shape for part in (target_model, draft_model) if part is not None]
    num_blocks = kv_cache.num_blocks(config, shapes, dtype, device, length)
    _log(config, draft_folder, ops, device, num_blocks, block_length)
    tokenizer = Tokenizer.load(folder)
    return Parts(
        tokenizer=tokenizer,
        scheduler=Scheduler(
            num_blocks=num_blocks,
            block_size=config.kv_block_size,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
            max_model_len=max_model_len,
            block_length=block_length,
            prefix_caching=config.prefix_caching,
        ),
        runner=Runner(
            target_model, draft_model, num_blocks, config.kv_block_size, block_length, dtype, device
        ),
        model=model,
        eos_token_ids=tuple(sorted({*model.eos_token_ids, *tokenizer.eos_token_ids})),
        max_model_len=max_model_len,
        block_length=block_length,
        fingerprint=Fingerprint(
            weights=weights_digest(folder),
            dtype=config.dtype,
            device=device_kind(device),
            kernels=f"{ops.name}-{ops.version}",
            tensor_parallel_size=1,
            torch=torch.__version__,
            triton=triton_version(),
        ),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _block_length(config: EngineConfig, draft: DraftConfig | None) -> int:
    if draft is None:
        if config.block_length not in (None, 1):
            raise ConfigError(
                f"block_length {config.block_length} needs a draft, and {config.model} has none"
            )
        return 1
    return config.block_length or draft.block_size


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position_embeddings
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {model.max_position_embeddings} "
            f"positions of {config.model}"
        )
    return config.max_model_len


def _sizes(model: ModelConfig, draft: DraftConfig | None) -> Sizes:
    if draft is None:
        return Sizes(target_linears(model), (model.head_dim,))
    return Sizes((*target_linears(model), *draft_linears(draft)), (model.head_dim, draft.head_dim))


def _log(
    config: EngineConfig,
    draft: Path | None,
    ops: Ops,
    device: torch.device,
    num_blocks: int,
    block_length: int,
) -> None:
    logger.info(
        "%s with %s on %s in %s: %s operations, block length %d, %d KV tokens",
        config.model,
        f"draft {draft.name}" if draft else "no draft",
        device,
        config.dtype,
        ops.name,
        block_length,
        num_blocks * config.kv_block_size,
    )
