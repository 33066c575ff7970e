"""Mixtures of experts: what config.json says about them, as transformers' Qwen3MoeConfig means it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_engine.errors import ConfigError
from dflash_engine.raw_config import RawConfig

MAX_EXPERTS = 1024
"""As many as the GPU kernels route to."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts that stands in some layers in place of the MLP."""

    num_experts: int
    top_k: int
    """Experts a token goes to."""
    intermediate_size: int
    """Of each expert."""
    renormalise: bool
    """Whether the weights of the chosen experts are scaled to a sum of 1."""
    layers: frozenset[int]
    """0-based layers that have experts."""


def parse_experts(raw: RawConfig, where: Path) -> ExpertsConfig | None:
    """None where no layer has experts. Raises `ConfigError` for numbers that cannot be."""
    dense = frozenset(raw.mlp_only_layers or ())
    step = raw.decoder_sparse_step
    layers = frozenset(i for i in range(raw.num_hidden_layers) if i not in dense and (i + 1) % step == 0)
    num, top_k = raw.num_experts, raw.num_experts_per_tok
    if not layers or num == 0:
        return None
    if top_k > num:
        raise ConfigError(f"{where}: num_experts_per_tok {top_k} is more than the {num} experts")
    if num > MAX_EXPERTS:
        raise ConfigError(f"{where}: {num} experts are not supported, at most {MAX_EXPERTS} are")
    return ExpertsConfig(num, top_k, raw.moe_intermediate_size, raw.norm_topk_prob, layers)
