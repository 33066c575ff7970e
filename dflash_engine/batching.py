"""From a plan's token positions to the index tensors of a forward pass: the only place that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_engine.ops import Tiling, tokens_per_tile

Span = tuple[int | None, bool]
"""How a layer sees: its sliding window (None for all) and whether it is causal inside the block."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence at positions [start, start + num_tokens)."""

    start: int
    num_tokens: int
    block_table: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T rows of a pass, the rows of one sequence side by side."""

    positions: Tensor
    """int32 [T]"""
    slots: Tensor
    """int64 [T], into the cache seen as [blocks * block size]"""
    row_seq: Tensor
    """int32 [T], row of `tables`"""
    tables: Tensor
    """int32 [sequences, most blocks]"""
    spans: dict[Span, tuple[Tensor, Tensor]]
    """First and last-plus-one position that each row sees, int32 [T] each."""
    tiling: Tiling


def forward_batch(
    segments: Sequence[Segment], spans: frozenset[Span], block_size: int, device: torch.device, group: int = 1
) -> ForwardBatch:
    counts = np.array([segment.num_tokens for segment in segments])
    starts = np.array([segment.start for segment in segments])
    row_seq = np.repeat(np.arange(len(segments)), counts)
    firsts = np.cumsum(counts) - counts
    positions = np.arange(counts.sum()) - firsts[row_seq] + starts[row_seq]
    tables = np.zeros((len(segments), max(len(segment.block_table) for segment in segments)), dtype=np.int32)
    for row, segment in enumerate(segments):
        tables[row, : len(segment.block_table)] = segment.block_table
    slots = tables[row_seq, positions // block_size].astype(np.int64) * block_size + positions % block_size
    ends = (starts + counts)[row_seq]
    seen = {}
    for window, causal in spans:
        begin = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
        seen[window, causal] = (_int32(begin, device), _int32(positions + 1 if causal else ends, device))
    tiles, tokens = tiles_of(counts, group)
    return ForwardBatch(
        positions=_int32(positions, device),
        slots=torch.from_numpy(slots).to(device),
        row_seq=_int32(row_seq, device),
        tables=torch.from_numpy(tables).to(device),
        spans=seen,
        tiling=Tiling(torch.from_numpy(tiles).to(device), tokens, 0),
    )


def tiles_of(counts: np.ndarray, group: int, block_length: int = 1) -> tuple[np.ndarray, int]:
    """int32 [tiles, 2] of (first row, rows) for segments of `counts` rows, and the most rows of a tile:
    made for single rows, for blocks, or for prompts, which makes few kinds of rounds.

    `group` query heads share a KV head.
    """
    longest = int(counts.max())
    fitting = [length for length in (1, block_length) if longest <= tokens_per_tile(length, group)]
    tokens = tokens_per_tile(fitting[0] if fitting else longest, group)
    pieces = -(-counts // tokens)
    segment = np.repeat(np.arange(len(counts)), pieces)
    within = np.arange(pieces.sum()) - (np.cumsum(pieces) - pieces)[segment]
    first = (np.cumsum(counts) - counts)[segment] + within * tokens
    size = np.minimum(counts[segment] - within * tokens, tokens)
    return np.stack([first, size], axis=1).astype(np.int32), tokens


def _int32(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(device)
