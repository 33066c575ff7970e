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
    """`keys[layer]` and `values[layer]` are [blocks, block size, Hkv, D]."""

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.num_layers, num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        self.keys: Tensor = torch.empty(size, dtype=dtype, device=device)
        self.values: Tensor = torch.empty(size, dtype=dtype, device=device)


def num_blocks(
    config: EngineConfig, shapes: list[KVShape], dtype: torch.dtype, device: torch.device, one_sequence: int
) -> int:
    """Blocks for all pools together. Raises `ConfigError` with the numbers where one sequence does not fit.

    `one_sequence` is the most tokens that a sequence holds, its draft block included.
    """
    per_token = sum(shape.bytes_per_token(dtype) for shape in shapes)
    if config.kv_cache_tokens is not None:
        tokens, source = config.kv_cache_tokens, "kv_cache_tokens"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable = int(total * config.gpu_memory_utilization) - (total - free)
        tokens, source = (
            max(usable, 0) // per_token,
            f"gpu_memory_utilization {config.gpu_memory_utilization}",
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
