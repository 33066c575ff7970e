"""The frozen target: its hidden states by the engine's own forward pass, its embedding and its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_engine.batching import Segment, forward_batch
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.config import EngineConfig
from dflash_engine.kv_cache import KVCache
from dflash_engine.loading import read_models
from dflash_engine.model_config import ModelConfig
from dflash_engine.models.target import TargetModel
from dflash_engine.random_weights import RandomCheckpoint
from dflash_engine.shard import ALONE
from dflash_engine.sources import Sources, find
from dflash_engine.training.config import TrainConfig
from dflash_engine.training.packing import PackedRows

KV_BLOCK = 16


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """What the draft shares with its target, and never changes."""

    embedding: Tensor
    """[V, H]"""
    head: Tensor
    """[V, H]"""
    final_norm: Tensor
    """[H], float32 on the CPU."""


def target_settings(config: TrainConfig, device: torch.device) -> EngineConfig:
    """An engine that only computes hidden states: the fastest operations will do."""
    return EngineConfig(
        model=config.target,
        draft=None,
        weights=config.weights,
        device=str(device),
        dtype=config.run.dtype,
        exact=False,
        max_model_len=config.data.row_tokens,
    )


def find_target(config: TrainConfig, device: torch.device) -> Sources:
    """Raises `ConfigError`."""
    return find(target_settings(config, device))


def read_frozen(config: TrainConfig, sources: Sources, device: torch.device) -> Frozen:
    """Raises `ConfigError`."""
    dtype = getattr(torch, config.run.dtype)
    model, checkpoint = sources.model, _checkpoint(config, sources.folder, dtype)
    shape = (model.vocab_size, model.hidden_size)
    embedding = checkpoint.take("model.embed_tokens.weight", shape).to(device, dtype)
    tied = model.tie_word_embeddings
    head = embedding if tied else checkpoint.take("lm_head.weight", shape).to(device, dtype)
    norm = checkpoint.take("model.norm.weight", (model.hidden_size,)).float()
    return Frozen(embedding, head, norm)


def _checkpoint(config: TrainConfig, folder: Path, dtype: torch.dtype) -> Checkpoint:
    if config.weights == "random":
        return RandomCheckpoint(torch.device("cpu"), dtype, 0)
    return Checkpoint(folder)


class Target:
    """The target's forward pass over packed rows, in groups of always the same size."""

    def __init__(self, config: TrainConfig, sources: Sources, device: torch.device) -> None:
        """Raises `ConfigError`."""
        threads = torch.get_num_threads()
        loaded = read_models(target_settings(config, device), sources, ALONE)
        # The engine leaves the CPU to its own threads; training computes with torch's.
        torch.set_num_threads(threads)
        self._model: TargetModel = loaded.models.target
        self._device = device
        self._dtype = loaded.models.dtype
        self._row_tokens = config.data.row_tokens
        self.group_rows = max(config.features.batch_tokens // config.data.row_tokens, 1)
        self._cache: KVCache | None = None

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @torch.no_grad()
    def features(self, rows: PackedRows, taps: Sequence[int], out: Tensor) -> Tensor:
        """Outputs of the 0-based layers `taps` side by side into out [R, S, len(taps) H], for rows of which
        there are `group_rows` at most; the last hidden states before the norm [R, S, H] are returned."""
        segments, at = [], 0
        for start, length in _segments(rows):
            num = -(-length // KV_BLOCK)
            segments.append(Segment(start, length, range(at, at + num)))
            at += num
        batch = forward_batch(
            segments, self._model.spans, KV_BLOCK, self._device, group=self._model.config.group
        )
        cache = self._cache_of(at)
        tokens = torch.from_numpy(rows.tokens.astype(np.int64)).to(self._device).flatten()
        hidden, _ = self._model.forward(tokens, batch, cache, taps, out.flatten(0, 1))
        return hidden.view(*rows.tokens.shape, -1)

    def _cache_of(self, blocks: int) -> KVCache:
        """Room for so many blocks, kept for the next group: groups differ in how many sequences begin."""
        if self._cache is None or self._cache.keys.shape[1] <= blocks:
            self._cache = None
            self._cache = KVCache(
                self._model.kv_shape, blocks + blocks // 4, KV_BLOCK, self._dtype, self._device
            )
        return self._cache

    @torch.no_grad()
    def best(self, hidden: Tensor) -> Tensor:
        """int64 [T]: the greedy choice behind each of the last hidden states [T, H]."""
        return self._model.logits(hidden).argmax(-1)


def _segments(rows: PackedRows) -> list[tuple[int, int]]:
    """(0, length) of each sequence in the order of their tokens; the last of a row takes the padding too,
    which changes nothing before it."""
    begins = np.flatnonzero(rows.firsts.ravel() == np.tile(np.arange(rows.row_tokens), rows.num_rows))
    ends = np.append(begins[1:], rows.firsts.size)
    return [(0, int(end - begin)) for begin, end in zip(begins, ends, strict=True)]
