"""What a GGUF file's metadata says about its model, in the keys of config.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_engine.errors import ConfigError

HF_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MISSING = object()
LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The same in all Llama 3.x; a GGUF holds the factors that come of them, not the bands."""


class GgufMetadata:
    """Typed access to the key/value part of a GGUF file."""

    def __init__(self, path: Path, reader: Any) -> None:
        self.path = path
        self._reader = reader
        self.architecture: str = self.get("general.architecture")

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The value of `key`. Raises `ConfigError` where it is missing and there is no default."""
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is MISSING:
            raise ConfigError(f"{self.path} has no metadata {key}")
        return default

    def model(self, key: str, default: Any = MISSING) -> Any:
        """The value of a key of the model's architecture."""
        return self.get(f"{self.architecture}.{key}", default)

    def token(self, name: str) -> int | None:
        """A special token's id, such as `bos`, or None."""
        value: int | None = self.get(f"tokenizer.ggml.{name}_token_id", None)
        return value


def hf_config(metadata: GgufMetadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json. Raises `ConfigError` where the model is of no supported kind."""
    architecture = metadata.architecture
    if architecture not in HF_CLASSES:
        raise ConfigError(
            f"{metadata.path}: architecture {architecture!r} is not supported, only {', '.join(HF_CLASSES)}"
        )
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{metadata.path} lacks tensors: token_embd.weight")
    heads = metadata.model("attention.head_count")
    hidden_size = metadata.model("embedding_length")
    head_dim = metadata.model("attention.key_length", hidden_size // heads)
    if metadata.model("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{metadata.path}: RoPE on a part of each head is not supported")
    return {
        "architectures": [HF_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.model("feed_forward_length"),
        "num_hidden_layers": metadata.model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.model("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.model("context_length"),
        "rms_norm_eps": _shortest(metadata.model("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.model("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, tensors),
        "attention_bias": architecture != "qwen2" and _has(tensors, "attn_q.bias"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "dtype": "bfloat16",
    }


def hf_generation_config(metadata: GgufMetadata) -> dict[str, Any]:
    """The content of generation_config.json: every token that ends an answer."""
    ends = [metadata.token(name) for name in ("eos", "eot", "eom")]
    return {
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": sorted({token for token in ends if token is not None}),
    }


def _rope_scaling(metadata: GgufMetadata, tensors: Mapping[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in tensors:
        return _llama3_scaling(metadata, tensors["rope_freqs.weight"])
    kind = metadata.model("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata.model("rope.scaling.factor")}
    if kind == "yarn":
        original = metadata.model("rope.scaling.original_context_length", None)
        if original is not None:
            scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(metadata: GgufMetadata, tensor: Any) -> dict[str, Any]:
    """Llama 3's scaling from its factors: the largest is `factor`, the bands are checked."""
    from dflash_engine.rope import RopeConfig, inverse_frequencies

    found = np.asarray(tensor.data, dtype=np.float64).reshape(-1)
    factor = _shortest(float(found.max()))
    theta = metadata.model("rope.freq_base", 10000.0)
    head_dim = 2 * found.size
    scaled = RopeConfig(theta, "llama3", factor, 8192, 1.0, 4.0)
    plain = inverse_frequencies(RopeConfig(theta), head_dim)
    expected = (plain / inverse_frequencies(scaled, head_dim)).numpy()
    if not np.allclose(found, expected, rtol=1e-3):
        raise ConfigError(
            f"{metadata.path}: the RoPE factors in rope_freqs.weight are not those of a Llama 3 model"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_BANDS}


def _has(tensors: Collection[str], suffix: str) -> bool:
    return any(name.endswith(suffix) for name in tensors)


def _shortest(value: float) -> float:
    """The decimal number that was meant: 1e-05 instead of float32's 9.999999747378752e-06."""
    assert math.isfinite(value)
    return float(str(np.float32(value)))
