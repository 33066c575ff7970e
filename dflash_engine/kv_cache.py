"""The tensors behind the block ids: keys and values of target and draft, and how many blocks fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError

CPU_KV_BYTES = 1 << 30
"""KV pools on a CPU unless `kv_cache_tokens` says otherwise; pages are touched only when used."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Layers and heads of one model's cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVCache:
    """`keys[layer]` and `values[layer]` are [blocks + 1, block size, Hkv, D]; the last block takes what rows
    of padding write."""

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.num_layers, num_blocks + 1, block_size, shape.num_kv_heads, shape.head_dim)
        self.keys: Tensor = torch.empty(size, dtype=dtype, device=device)
        self.values: Tensor = torch.empty(size, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Caches:
    """The pools of target and draft, one block id for both."""

    target: KVCache
    draft: KVCache | None
    num_blocks: int
    block_size: int


def num_blocks(
    config: EngineConfig,
    shapes: list[KVShape],
    dtype: torch.dtype,
    device: torch.device,
    one_sequence: int,
    workspace_bytes: int = 0,
) -> int:
    """Blocks for all pools together. Raises `ConfigError` with the numbers where one sequence does not fit.

    `one_sequence` is the most tokens that a sequence holds, its draft block included; `workspace_bytes` of
    a GPU's memory are kept for other things than weights and caches.
    """
    per_token = sum(shape.bytes_per_token(dtype) for shape in shapes)
    if config.kv_cache_tokens is not None:
        tokens, source = config.kv_cache_tokens, "kv_cache_tokens"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable = int(total * config.gpu_memory_utilization) - (total - free) - workspace_bytes
        tokens = max(usable, 0) // per_token
        source = (
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total / 1e9:.1f} GB, of which "
            f"{(total - free) / 1e9:.1f} GB are taken by weights and others and "
            f"{workspace_bytes / 1e9:.1f} GB by a step's work,"
        )
    else:
        tokens, source = max(CPU_KV_BYTES // per_token, one_sequence + config.kv_block_size), "the default"
    blocks = tokens // config.kv_block_size
    if blocks * config.kv_block_size < one_sequence:
        raise ConfigError(
            f"{source} leaves room for {blocks * config.kv_block_size} tokens of {per_token:,} bytes, but "
            f"one sequence may take {one_sequence}: lower max_model_len or give more memory"
        )
    return blocks
