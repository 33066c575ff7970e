"""A mixture of experts in place of a layer's MLP, as in Qwen3-MoE."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dflash_engine.experts_config import ExpertsConfig
from dflash_engine.layers import Linear, WeightReader
from dflash_engine.ops import Ops, Weight


def expert_linears(hidden: int, config: ExpertsConfig) -> tuple[tuple[int, int], ...]:
    """[N, K] of router, gate-up and down."""
    inner = config.intermediate_size
    return (config.num_experts, hidden), (2 * inner, hidden), (hidden, inner)


@dataclass(frozen=True, slots=True)
class Experts:
    """The gated MLPs that a router chooses for each row, weighted and added to the residual.

    Names and semantics are those of transformers' Qwen3MoeSparseMoeBlock.
    """

    norm: Tensor
    router: Linear
    gate_up: Weight
    down: Weight
    top_k: int
    renormalise: bool

    @classmethod
    def read(cls, weights: WeightReader, prefix: str, hidden: int, config: ExpertsConfig) -> Experts:
        """Takes a layer's tensors, with one expert at a time in memory that is not yet packed.

        Raises `ConfigError` where one is missing or has another shape.
        """
        inner, num = config.intermediate_size, config.num_experts
        experts = f"{prefix}.mlp.experts"
        return cls(
            norm=weights.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            router=weights.linear(f"{prefix}.mlp.gate", num, hidden),
            gate_up=weights.experts(
                experts, {"gate_proj": inner, "up_proj": inner}, "gate_up_proj", hidden, num, dim=0
            ),
            down=weights.experts(experts, {"down_proj": hidden}, "down_proj", inner, num, dim=1),
            top_k=config.top_k,
            renormalise=config.renormalise,
        )

    def forward(self, ops: Ops, residual: Tensor, eps: float, tap: Tensor | None) -> None:
        """Adds to residual [T, H] in place; `tap` [T, H] gets a copy of the sum."""
        ops.experts(
            residual,
            self.norm,
            eps,
            self.router.weight,
            self.gate_up,
            self.down,
            self.top_k,
            self.renormalise,
            tap,
        )
