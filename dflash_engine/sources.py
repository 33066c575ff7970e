"""What the settings name: model and draft, found, their config.json read and checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_engine.catalog import resolve_draft, resolve_model
from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError
from dflash_engine.model_config import DraftConfig, ModelConfig, read_draft_config, read_model_config
from dflash_engine.random_weights import draft_beside
from dflash_engine.shard import Shard


@dataclass(frozen=True, slots=True)
class Sources:
    """What the settings name, found and checked before anything large is read."""

    folder: Path
    model: ModelConfig
    draft_folder: Path | None
    draft: DraftConfig | None
    block_length: int
    max_model_len: int


def find(config: EngineConfig) -> Sources:
    """Raises `ConfigError`."""
    folder = resolve_model(config.model)
    model = read_model_config(folder)
    draft_folder = _draft_folder(config, folder)
    draft = read_draft_config(draft_folder, model) if draft_folder else None
    shard = Shard(0, config.tensor_parallel_size)
    shard.check(model, config.model)
    if draft is not None:
        shard.check(draft, f"the draft {draft_folder}")
    return Sources(
        folder, model, draft_folder, draft, _block_length(config, draft), _max_model_len(config, model)
    )


def _draft_folder(config: EngineConfig, folder: Path) -> Path | None:
    if config.weights == "random" and config.draft == "auto":
        return draft_beside(folder)
    return resolve_draft(config.draft, config.model)


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
