"""What a checkpoint's config.json says, for target models and DFlash drafts, as checked values.

Key names, defaults and meaning of the target follow transformers' Llama, Qwen2, Qwen3
and Qwen3-MoE configurations; those of the draft follow z-lab's published DFlash checkpoints (arXiv
2602.06036).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from dflash_engine.errors import ConfigError
from dflash_engine.experts_config import ExpertsConfig, parse_experts
from dflash_engine.raw_config import RawConfig, RawDraftConfig, read_json
from dflash_engine.rope import RopeConfig, parse_rope

Architecture = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768}
DEFAULT_BLOCK_SIZE = 16
QWEN3_HEAD_DIM = 128
QWEN3_MOE_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and rules of a target model."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    """One a layer: position i sees position j <= i where i - j < window; None sees all."""
    eos_token_ids: tuple[int, ...]
    """From config.json and generation_config.json, ascending."""
    experts: ExpertsConfig | None = None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Shapes and rules of a DFlash draft; embedding and lm_head are the target's."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    vocab_size: int
    max_position_embeddings: int
    block_size: int
    """Anchor plus drafted tokens in one pass of the draft."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based layers of the target whose outputs are the context features, in the order of `fc`."""
    windows: tuple[int | None, ...]
    """One a layer, as in `ModelConfig`."""
    causal: tuple[bool, ...]
    """One a layer: whether positions inside the block see only the ones before them."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


def read_model_config(folder: Path) -> ModelConfig:
    """The target's configuration from config.json and generation_config.json in `folder`.

    Raises `ConfigError` where a key is missing or wrong, or the model is of a kind not supported.
    """
    where = folder / "config.json"
    raw = RawConfig.read(where)
    if any("DFlash" in name for name in raw.architectures):
        raise ConfigError(f"{folder} is a DFlash draft, not a model: give it as draft")
    architecture = raw.model_type
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: model_type {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method", "unknown")
        raise ConfigError(
            f"{where}: weights quantised with {method} are not supported; use the bf16 model or a GGUF file"
        )
    _check_activation(raw, where)
    attention_bias = bool(raw.attention_bias)
    max_positions = raw.max_position_embeddings or MAX_POSITIONS[architecture]
    return ModelConfig(
        architecture=cast("Architecture", architecture),
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=_kv_heads(raw, where),
        head_dim=_head_dim(raw, QWEN3_HEAD_DIM if architecture == "qwen3" else None, where),
        rms_norm_eps=raw.rms_norm_eps,
        rope=parse_rope(raw.rope_keys(where), max_positions, where),
        qkv_bias=architecture == "qwen2" or attention_bias,
        o_bias=architecture != "qwen2" and attention_bias,
        mlp_bias=architecture == "llama" and bool(raw.mlp_bias),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        tie_word_embeddings=bool(raw.tie_word_embeddings),
        max_position_embeddings=max_positions,
        windows=_model_windows(raw, where),
        eos_token_ids=_eos_token_ids(raw, folder),
        experts=parse_experts(raw, where) if architecture == "qwen3_moe" else None,
    )


def read_draft_config(folder: Path, target: ModelConfig) -> DraftConfig:
    """The draft's configuration from config.json in `folder`, checked against its target.

    Raises `ConfigError` where a key is missing or wrong, or the draft is not one for this target.
    """
    where = folder / "config.json"
    raw = RawDraftConfig.read(where)
    if (
        any("DFlash2" in name for name in raw.architectures)
        or raw.dflash("conv_kernel_size", where) is not None
    ):
        raise ConfigError(
            f"{where} is a DFlash 2 draft (convolutions, candidate selector): only DFlash 1 is supported"
        )
    _check_activation(raw, where)
    num_layers = raw.num_hidden_layers
    layer_types = raw.attention_kinds(where)
    block_size = raw.dflash_int("block_size", where)
    max_positions = raw.max_position_embeddings or target.max_position_embeddings
    draft = DraftConfig(
        num_layers=num_layers,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_heads=raw.num_attention_heads,
        num_kv_heads=_kv_heads(raw, where),
        head_dim=_head_dim(raw, QWEN3_HEAD_DIM, where),
        rms_norm_eps=raw.rms_norm_eps,
        rope=parse_rope(raw.rope_keys(where), max_positions, where),
        attention_bias=bool(raw.attention_bias),
        vocab_size=raw.vocab_size,
        max_position_embeddings=max_positions,
        block_size=DEFAULT_BLOCK_SIZE if block_size is None else block_size,
        mask_token_id=_mask_token_id(raw, where),
        target_layer_ids=_target_layer_ids(raw, target, where),
        windows=_windows(layer_types, raw.sliding_window, where),
        causal=_causal(raw, layer_types, where),
    )
    _check_pair(draft, raw, target, where)
    return draft


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The reference implementation's default: layers spread evenly from 1 to the third last."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + layer * span / (num_draft_layers - 1)) for layer in range(num_draft_layers))


def _check_pair(draft: DraftConfig, raw: RawDraftConfig, target: ModelConfig, where: Path) -> None:
    for what, found, expected in (
        ("hidden_size", draft.hidden_size, target.hidden_size),
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("num_target_layers", raw.num_target_layers or target.num_layers, target.num_layers),
    ):
        if found != expected:
            raise ConfigError(
                f"{where}: {what} {found} of the draft does not fit the model's {expected}; "
                "give the draft that was trained for this model, or draft: none"
            )
    if draft.block_size < 1:
        raise ConfigError(f"{where}: block_size {draft.block_size} is less than 1")
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise ConfigError(
            f"{where}: mask_token_id {draft.mask_token_id} lies outside the vocabulary of {target.vocab_size}"
        )
    for layer in draft.target_layer_ids:
        if not 0 <= layer < target.num_layers:
            raise ConfigError(
                f"{where}: target_layer_ids names layer {layer}, the model has {target.num_layers}"
            )


def _check_activation(raw: RawConfig, where: Path) -> None:
    if raw.hidden_act != "silu":
        raise ConfigError(f"{where}: hidden_act {raw.hidden_act!r} is not supported, only 'silu'")


def _kv_heads(raw: RawConfig, where: Path) -> int:
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads or raw.num_attention_heads
    if heads % kv_heads:
        raise ConfigError(f"{where}: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    return kv_heads


def _head_dim(raw: RawConfig, default: int | None, where: Path) -> int:
    head_dim = raw.head_dim or default or raw.hidden_size // raw.num_attention_heads
    if head_dim % 2:
        raise ConfigError(f"{where}: head_dim {head_dim} is odd; RoPE needs pairs")
    return head_dim


def _model_windows(raw: RawConfig, where: Path) -> tuple[int | None, ...]:
    if raw.model_type == "llama":
        return (None,) * raw.num_hidden_layers
    if raw.model_type == "qwen3_moe":
        # One window in all layers: transformers knows no layer types here.
        window = raw.sliding_window or QWEN3_MOE_WINDOW
        return (window if raw.use_sliding_window else None,) * raw.num_hidden_layers
    return _windows(raw.attention_kinds(where), raw.sliding_window if raw.use_sliding_window else None, where)


def _windows(layer_types: Sequence[str], window: int | None, where: Path) -> tuple[int | None, ...]:
    if window is None and "sliding_attention" in layer_types:
        raise ConfigError(f"{where}: layer_types has sliding_attention, but no sliding_window is set")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _eos_token_ids(raw: RawConfig, folder: Path) -> tuple[int, ...]:
    found = raw.eos_ids()
    generation = folder / "generation_config.json"
    if generation.is_file():
        found |= RawConfig.eos_ids_of(read_json(generation), generation)
    return tuple(sorted(found))


def _mask_token_id(raw: RawDraftConfig, where: Path) -> int:
    mask = raw.dflash_int("mask_token_id", where)
    if mask is None:
        raise ConfigError(f"{where}: mask_token_id is missing, in dflash_config and at the top level")
    return mask


def _target_layer_ids(raw: RawDraftConfig, target: ModelConfig, where: Path) -> tuple[int, ...]:
    ids = raw.dflash("target_layer_ids", where)
    if ids is None:
        return build_target_layer_ids(raw.num_target_layers or target.num_layers, raw.num_hidden_layers)
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        raise ConfigError(f"{where}: target_layer_ids is not a list of layer numbers: {ids!r}")
    return tuple(ids)


def _causal(raw: RawDraftConfig, layer_types: Sequence[str], where: Path) -> tuple[bool, ...]:
    """`is_causal` or dflash_config.causal rules all layers; without it only sliding layers are causal."""
    said = raw.said_causal(where)
    return tuple(kind == "sliding_attention" if said is None else said for kind in layer_types)
