"""GGUF files, expanded once into a folder in Hugging Face layout that the ordinary loader reads.

The folder lies in the cache under the SHA-256 of the file's bytes. It is written beside its final
place and renamed into it, so it is there as a whole or not at all, also with two processes at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from dflash_engine.errors import ConfigError
from dflash_engine.gguf_config import GgufMetadata, hf_config, hf_generation_config
from dflash_engine.gguf_tokenizer import build_tokenizer

LAYOUT_VERSION = 1
"""Part of the folder's name; to be raised when the same file would be expanded differently."""
SHARD_BYTES = 4 << 30
BYTES_PER_WEIGHT = 2
ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's scaling as one factor a frequency; it goes into config.json."""

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_folder() -> Path:
    """Where expanded models are kept: $DFLASH_CACHE, or ~/.cache/dflash."""
    return Path(os.environ.get("DFLASH_CACHE") or Path.home() / ".cache" / "dflash")


def file_digest(path: Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal digits. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def expand_gguf(path: Path, digest: str | None = None) -> Path:
    """The folder that holds the model of a GGUF file, made now unless it is in the cache.

    `digest` is the file's SHA-256 where the caller knows it. Raises `ConfigError` where the file is
    no GGUF of a supported architecture, or has tensors missing, unknown or of an unknown type.
    """
    folder = cache_folder() / "gguf" / f"{digest or file_digest(path)}-v{LAYOUT_VERSION}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name[:16]}.", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"the cache {folder.parent} cannot be written ({error.strerror}); set DFLASH_CACHE"
        ) from error
    try:
        _write(path, scratch)
        # mkdtemp and safetensors make what only this user can read; a cache may be shared.
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process was first: a folder with files in it is never replaced.
            if not folder.is_dir():
                raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be expanded into {folder.parent}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write(path: Path, folder: Path) -> None:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error
    metadata = GgufMetadata(path, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config(metadata, tensors)
    names = _hf_names(path, set(tensors), config)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", hf_generation_config(metadata))
    build_tokenizer(metadata).save_pretrained(folder)
    _write_weights(path, folder, {names[name]: tensors[name] for name in names}, config)


def _hf_names(path: Path, found: set[str], config: dict[str, Any]) -> dict[str, str]:
    """GGUF name to Hugging Face name of every tensor. Raises `ConfigError` that lists what is odd."""
    names = dict(GLOBAL_NAMES)
    optional = {"output.weight"}
    for layer in range(config["num_hidden_layers"]):
        for short, long in LAYER_NAMES.items():
            if short.endswith(("q_norm", "k_norm")) and config["model_type"] != "qwen3":
                continue
            for kind in ("weight", "bias"):
                name = f"blk.{layer}.{short}.{kind}"
                names[name] = f"model.layers.{layer}.{long}.{kind}"
                if kind == "bias" and not _has_bias(short, config):
                    del names[name]
    missing = sorted(names.keys() - found - optional)
    unknown = sorted(found - names.keys() - {ROPE_FACTORS})
    for what, odd in (("lacks", missing), ("has unknown", unknown)):
        if odd:
            more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
            raise ConfigError(f"{path} {what} tensors: {', '.join(odd[:8])}{more}")
    return {name: hf for name, hf in names.items() if name in found}


def _has_bias(short: str, config: dict[str, Any]) -> bool:
    if short in ("attn_q", "attn_k", "attn_v"):
        return config["model_type"] == "qwen2" or bool(config["attention_bias"])
    return short == "attn_output" and config["model_type"] != "qwen2" and bool(config["attention_bias"])


def _write_weights(path: Path, folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """bf16 safetensors, one shard in memory at a time."""
    from safetensors.torch import save_file

    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = int(tensor.n_elements) * BYTES_PER_WEIGHT
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = (
            f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        )
        weights = {name: _weight(path, name, tensors[name], config) for name in names}
        save_file(weights, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _weight(path: Path, name: str, tensor: Any, config: dict[str, Any]) -> Any:
    import torch
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ConfigError(
            f"{path}: tensor {tensor.name} is {tensor.tensor_type.name}, which cannot be read"
        ) from error
    # A copy: a plain float32 tensor is a read-only view of the file.
    weight = torch.tensor(values, dtype=torch.bfloat16).contiguous()
    if config["model_type"] == "llama" and "self_attn.q_proj" in name:
        return _unpermuted(weight, config["num_attention_heads"])
    if config["model_type"] == "llama" and "self_attn.k_proj" in name:
        return _unpermuted(weight, config["num_key_value_heads"])
    return weight


def _unpermuted(weight: Any, num_heads: int) -> Any:
    """Rows in Hugging Face's order for RoPE: all first halves of the pairs of a head, then all second.

    llama.cpp's conversion of Llama models puts the two rows of each rotated pair side by side.
    """
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
