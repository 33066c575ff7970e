"""config.json as it stands in the file: keys, types and defaults, not yet what they mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from dflash_engine.errors import ConfigError, describe


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConfigError` that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing: the folder holds no model in Hugging Face layout") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value


class RawConfig(BaseModel):
    """Keys of config.json that the engine reads; others are let through unread."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, protected_namespaces=())

    model_type: str = ""
    architectures: list[str] = Field(default_factory=list)
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: int | None = Field(default=None, ge=1)
    rope_theta: float | None = Field(default=None, gt=0)
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    use_sliding_window: bool | None = None
    sliding_window: int | None = Field(default=None, ge=1)
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None
    num_experts: int = Field(
        default=128, ge=0, validation_alias=AliasChoices("num_experts", "num_local_experts")
    )
    num_experts_per_tok: int = Field(default=8, ge=1)
    moe_intermediate_size: int = Field(default=768, ge=1)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = Field(default=1, ge=1)
    mlp_only_layers: list[int] | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parse the file. Raises `ConfigError` that names file and key."""
        return cls.parse(read_json(path), path)

    @classmethod
    def parse(cls, values: Mapping[str, Any], path: Path) -> Self:
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(f"{path}: {describe(error.errors())}") from error

    def eos_ids(self) -> set[int]:
        return _as_set(self.eos_token_id)

    @staticmethod
    def eos_ids_of(values: Mapping[str, Any], path: Path) -> set[int]:
        """End tokens of a generation_config.json."""
        try:
            return _as_set(_RawGenerationConfig.model_validate(dict(values)).eos_token_id)
        except ValidationError as error:
            raise ConfigError(f"{path}: {describe(error.errors())}") from error

    def attention_kinds(self, path: Path) -> tuple[str, ...]:
        """`full_attention` or `sliding_attention` for each layer. Raises `ConfigError` for others."""
        num_layers = self.num_hidden_layers
        if self.layer_types is None:
            num_full = self.max_window_layers if self.use_sliding_window else num_layers
            return tuple("full_attention" if i < num_full else "sliding_attention" for i in range(num_layers))
        if len(self.layer_types) != num_layers:
            raise ConfigError(
                f"{path}: layer_types has {len(self.layer_types)} entries for {num_layers} layers"
            )
        for kind in self.layer_types:
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(f"{path}: layer type {kind!r} is not full_attention or sliding_attention")
        return tuple(self.layer_types)

    def rope_keys(self, path: Path) -> dict[str, Any]:
        """RoPE keys of all layouts in one flat mapping.

        transformers 4 writes `rope_theta` and `rope_scaling`; 5 writes `rope_parameters`, flat or one
        for each layer type. Raises `ConfigError` where layer types differ in their RoPE.
        """
        keys = dict(self.rope_scaling or self.rope_parameters or {})
        nested = [value for key, value in keys.items() if key.endswith("_attention") and value is not None]
        if nested:
            if any(value != nested[0] for value in nested):
                raise ConfigError(
                    f"{path}: rope_parameters differ between layer types, which is not supported"
                )
            keys = dict(nested[0])
        for key in ("rope_theta", "partial_rotary_factor"):
            if keys.get(key) is None and getattr(self, key) is not None:
                keys[key] = getattr(self, key)
        if self.original_max_position_embeddings is not None:
            keys["original_max_position_embeddings"] = self.original_max_position_embeddings
        return keys


class RawDraftConfig(RawConfig):
    """The same with DFlash's keys, which stand in `dflash_config` or at the top level."""

    dflash_config: dict[str, Any] = Field(default_factory=dict)
    num_target_layers: int | None = Field(default=None, ge=1)
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    conv_kernel_size: int | None = None
    is_causal: bool | None = None

    def dflash(self, key: str, path: Path) -> Any:
        """The value of `key`, or None. Raises `ConfigError` where two places contradict each other."""
        return self._one_of(key, getattr(self, key), key, path)

    def dflash_int(self, key: str, path: Path) -> int | None:
        value = self.dflash(key, path)
        if value is not None and type(value) is not int:
            raise ConfigError(f"{path}: dflash_config.{key} is not a whole number: {value!r}")
        return value

    def said_causal(self, path: Path) -> bool | None:
        """What the checkpoint says about causality inside a block, or None."""
        value = self._one_of("is_causal", self.is_causal, "causal", path)
        if value is not None and type(value) is not bool:
            raise ConfigError(f"{path}: dflash_config.causal is not true or false: {value!r}")
        return value

    def _one_of(self, top_key: str, top: Any, inner_key: str, path: Path) -> Any:
        inner = self.dflash_config.get(inner_key)
        if top is not None and inner is not None and top != inner:
            raise ConfigError(f"{path}: {top_key} is {top!r} but dflash_config.{inner_key} is {inner!r}")
        return inner if top is None else top


class _RawGenerationConfig(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    eos_token_id: int | list[int] | None = None


def _as_set(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
