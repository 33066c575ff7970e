"""Rotary position embedding: which frequencies a checkpoint asks for, and their tables.

Scaling forms as in transformers' `ROPE_INIT_FUNCTIONS`: linear position interpolation, Llama 3.1's
band-wise interpolation, and YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dflash_engine.errors import ConfigError

RopeType = Literal["default", "linear", "llama3", "yarn"]
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies theta^(-2i/head_dim), and how they are scaled for longer contexts."""

    theta: float = DEFAULT_THETA
    type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """Context the model was pretrained for (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether YaRN's ramp begins and ends at whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""


def parse_rope(keys: Mapping[str, Any], max_positions: int, where: Path) -> RopeConfig:
    """The RoPE of one flat mapping of config keys. Raises `ConfigError` that names file and key."""
    kind = keys.get("rope_type") or keys.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(
            f"{where}: RoPE type {kind!r} is not supported, only default, linear, llama3 and yarn"
        )
    if keys.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(f"{where}: partial_rotary_factor {keys['partial_rotary_factor']} is not supported")

    def number(key: str, default: float | None = None) -> float:
        value = keys.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{where}: {key} of RoPE type {kind} is {value!r}, not a number above 0")
        return float(value)

    theta = number("rope_theta", DEFAULT_THETA)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", number("factor"))
    original = int(number("original_max_position_embeddings", max_positions))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise ConfigError(f"{where}: low_freq_factor {low} is not below high_freq_factor {high}")
        return RopeConfig(theta, "llama3", number("factor"), original, low, high)
    factor = number("factor", max_positions / original)
    return RopeConfig(
        theta,
        cast("RopeType", kind),
        factor,
        original,
        beta_fast=number("beta_fast", 32),
        beta_slow=number("beta_slow", 1),
        truncate=keys.get("truncate") is not False,
        attention_factor=number("attention_factor", _yarn_attention_factor(keys, factor)),
    )


def rope_tables(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, head_dim // 2], for positions 0 to length - 1.

    Computed in float64: in float32 the angle at position 100,000 is off by up to 0.01.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return cos.float(), sin.float()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, float64 [head_dim // 2]."""
    plain = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(plain, rope)
    if rope.type == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """High frequencies stay, low ones are divided, those between are blended."""
    rotations = rope.original_max_positions * plain / (2 * math.pi)
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Dimensions that turn more than beta_fast times stay, fewer than beta_slow are divided."""

    def dimension_of(rotations: float) -> float:
        positions_per_radian = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A ramp of no width is a step; transformers widens it by the same amount.
    width = high - low or 0.001
    divide = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return divide * plain / rope.factor + (1 - divide) * plain


def _yarn_attention_factor(keys: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale_key, all_dim_key = keys.get("mscale"), keys.get("mscale_all_dim")
    if mscale_key and all_dim_key:
        return mscale(mscale_key) / mscale(all_dim_key)
    return mscale(1.0)
