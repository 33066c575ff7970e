"""Which part of a model one rank of a tensor-parallel engine holds (Megatron-LM, arXiv 1909.08053).

Attention is divided by KV heads, the MLPs and every expert by their inner width: each rank computes whole
rows of heads and inner values from whole inputs, and its part of the sums behind them. Embedding, head,
norms, router and the draft's fc are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Protocol, TypeVar

from torch import Tensor

from dflash_engine.errors import ConfigError
from dflash_engine.model_config import DraftConfig, ModelConfig
from dflash_engine.ops import Group

AnyConfig = TypeVar("AnyConfig", ModelConfig, DraftConfig)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's consecutive part along `dim`, whose length the size divides; a view."""
        if self.size == 1:
            return whole
        length = whole.shape[dim] // self.size
        assert length * self.size == whole.shape[dim], (whole.shape, dim, self.size)
        return whole.narrow(dim, self.rank * length, length)

    def share(self, config: AnyConfig) -> AnyConfig:
        """The config with the heads and inner widths that one rank holds; `check` it first."""
        if self.size == 1:
            return config
        changed = replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            intermediate_size=config.intermediate_size // self.size,
        )
        if isinstance(changed, ModelConfig) and changed.experts is not None:
            inner = changed.experts.intermediate_size // self.size
            changed = replace(changed, experts=replace(changed.experts, intermediate_size=inner))
        return changed

    def check(self, config: ModelConfig | DraftConfig, name: str) -> None:
        """Raises `ConfigError` with the numbers where the model cannot be divided so."""
        widths = {"key/value heads": config.num_kv_heads}
        experts = config.experts if isinstance(config, ModelConfig) else None
        if experts is None or len(experts.layers) < config.num_layers:
            widths["inner values of the MLP"] = config.intermediate_size
        if experts is not None:
            widths["inner values of an expert"] = experts.intermediate_size
        wrong = [f"{width} {what}" for what, width in widths.items() if width % self.size]
        if wrong:
            most = gcd(*widths.values())
            sizes = ", ".join(str(size) for size in range(1, min(most, 64) + 1) if most % size == 0)
            raise ConfigError(
                f"tensor_parallel_size {self.size} does not divide the {' and '.join(wrong)} of {name}; "
                f"sizes that do: {sizes}"
            )


UNDIVIDED = Shard()


class Followers(Protocol):
    """The other ranks, as rank 0 leads them."""

    def tell(self, told: object) -> None:
        """What they have to do next: a `Round` or a `StepPlan`. Raises `EngineDead` as `check` does."""
        ...

    def check(self) -> None:
        """Raises `EngineDead` where one of them has ended."""
        ...


def _alone(number: int) -> int:
    return number


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of an engine and its way to the others."""

    shard: Shard = UNDIVIDED
    group: Group | None = None
    """None for a rank that is alone."""
    agree: Callable[[int], int] = _alone
    """The least of all ranks' numbers; waits for all of them. Raises `ConfigError` where one has failed."""
    followers: Followers | None = None
    """Of rank 0, if there are any."""

    @property
    def leads(self) -> bool:
        return self.shard.rank == 0


ALONE = Rank()
