"""Shapes of one program's work, by the number of rows and the matrix; no choice changes a bit.

From a sweep on an H200 over the embedded model (576 wide) and Qwen3-8B (4096 wide); few warps win for few
rows, where a tile is a stream of weights.
"""

from __future__ import annotations

from typing import NamedTuple

WIDE_ROWS = 16
"""With more rows of a 16-bit type, tiles are loaded through tensor descriptors."""
_NARROW = 2048
"""A matrix with shorter rows is bound by latency, a longer one by bytes."""


class Tile(NamedTuple):
    """Outputs, rows and depth of a step of one program, and how it is compiled."""

    BN: int
    BT: int
    BK: int
    num_warps: int
    num_stages: int
    flip: bool = False
    """Rows are the first operand of the product; only where tiles are loaded through descriptors."""


def small_tile(rows: int, width: int, *, pair: bool, itemsize: int) -> Tile:
    """For at most WIDE_ROWS rows, or rows of float32; `pair`: two matrices side by side."""
    if itemsize == 4:
        return Tile(16, 16 if rows <= 16 else 32 if rows <= 32 else 64, 32, 4, 2)
    if rows > WIDE_ROWS:  # of a width that descriptors do not take
        return Tile(64, 64, 64, 4, 4)
    if width <= _NARROW:
        return Tile(16, 16, 64, 2, 8) if pair else Tile(16, 16, 128, 2, 5)
    return Tile(32, 16, 64, 2, 8) if pair else Tile(16, 16, 256, 1, 4)


def wide_tile(rows: int, outputs: int, width: int, *, pair: bool) -> Tile:
    """For more than WIDE_ROWS rows of a 16-bit type."""
    if width <= _NARROW:
        return _narrow_tile(rows, pair=pair)
    if rows <= 64:
        if pair:
            return Tile(64, 64, 128, 4, 4, True)
        return Tile(32, 64, 128, 4, 6, True) if outputs <= 4096 else Tile(64, 64, 128, 4, 4)
    if rows < 1024:
        if pair:
            return Tile(128, 128, 64, 8, 4, True)
        many = rows >= 384 or (rows > 192 and outputs > 4096)
        return Tile(128, 128, 64, 8, 4) if many else Tile(64, 128, 128, 4, 4)
    return Tile(128, 128, 64, 8, 4) if pair else Tile(256, 128, 64, 8, 4)


def _narrow_tile(rows: int, *, pair: bool) -> Tile:
    if rows <= 64:
        return Tile(32, 64, 128, 4, 4, True) if pair else Tile(16, 64, 128, 4, 6, True)
    if rows < 1024:
        if pair:
            return Tile(64, 128, 64, 4, 4, True) if rows >= 384 else Tile(32, 128, 64, 4, 5, True)
        return Tile(64, 64, 128, 4, 4, True)
    return Tile(64, 128, 64, 4, 4) if pair else Tile(128, 128, 64, 8, 4)


def qkv_tile(itemsize: int) -> Tile:
    """For the product that ends in a rotation, of at most 16 rows."""
    return Tile(16, 16, 32, 4, 2) if itemsize == 4 else Tile(16, 16, 256, 2, 3)


def head_tile(rows: int, width: int, itemsize: int, *, wide: bool) -> Tile:
    """For the product with the vocabulary."""
    if itemsize == 4:
        return Tile(32, 16 if rows <= 16 else 64, 32, 4, 2)
    if wide:
        return Tile(64, 64, 64, 4, 4) if rows <= 64 else Tile(256, 128, 64, 8, 3)
    if rows > WIDE_ROWS:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 16, 64, 4, 4) if width <= _NARROW else Tile(64, 16, 128, 4, 4)
