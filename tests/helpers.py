"""Tiny random models and drafts on disk, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "Where is my order? The order was sent on Monday and should be with you in three days.",
    "I would like to return the blue jacket. You can return it within thirty days of the order.",
    "How do I reset the password of my account? Open the account page and choose reset.",
    "我的订单在哪里？您的订单已经发货。",
)
TOKENIZER_SIZE = 304
"""Smaller than the models' vocabulary, as in Qwen: a model can choose ids that have no text."""
MASK_TOKEN_ID = TOKENIZER_SIZE
TINY_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def byte_level_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `TOKENIZER_SIZE` tokens: any text, `<|im_end|>` (id 2) ends a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == TOKENIZER_SIZE
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**named, **settings})


def tiny_model_folder(
    tmp_path: Path,
    architecture: str,
    *,
    seed: int = 0,
    std: float = 0.15,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "5GB",
    name: str | None = None,
    **overrides: Any,
) -> Path:
    """Write a random `llama`, `qwen2`, `qwen3` or `qwen3_moe` model with tokenizer and chat template.

    `overrides` are fields of the transformers configuration. Every weight is random, norms and
    biases too, so that one left out or misplaced changes the logits.
    """
    folder = tmp_path / (name or f"{architecture}-{seed}")
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **(TINY_EXPERTS if architecture == "qwen3_moe" else {}),
        **overrides,
    }
    if architecture == "qwen2":
        settings.pop("head_dim")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings), dtype=dtype)
    randomise(dict(model.named_parameters()), seed, std)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def tiny_draft_folder(
    tmp_path: Path,
    target_folder: Path,
    *,
    seed: int = 1,
    std: float = 0.15,
    dtype: torch.dtype = torch.bfloat16,
    prefix: str = "",
    name: str | None = None,
    **overrides: Any,
) -> Path:
    """Write a random draft for `target_folder` in z-lab's published format.

    `overrides` replace keys of its config.json (None leaves the key out); `prefix` stands before
    each tensor name.
    """
    folder = tmp_path / (name or f"{target_folder.name}-draft-{seed}")
    folder.mkdir(parents=True)
    target = json.loads((target_folder / "config.json").read_text())
    num_layers = overrides.get("num_hidden_layers", 2)
    heads, kv_heads, head_dim = target["num_attention_heads"], target["num_key_value_heads"], 16
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, 2]},
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": num_layers,
        "hidden_size": target["hidden_size"],
        "intermediate_size": 96,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "layer_types": ["full_attention"] * num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": num_layers,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": target["vocab_size"],
        "dtype": "bfloat16",
        **overrides,
    }
    config = {key: value for key, value in config.items() if value is not None or key not in overrides}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    ids = config.get("target_layer_ids") or config.get("dflash_config", {}).get("target_layer_ids", ())
    shapes = draft_shapes(config, len(ids) or num_layers)
    tensors = {prefix + key: torch.empty(shape, dtype=dtype) for key, shape in shapes.items()}
    randomise(tensors, seed, std)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draft_shapes(config: dict[str, Any], num_features: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a draft with this config.json."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_features * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        shapes |= {
            f"layers.{layer}.input_layernorm.weight": (hidden,),
            f"layers.{layer}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_proj.weight": (q_size, hidden),
            f"{attention}.k_proj.weight": (kv_size, hidden),
            f"{attention}.v_proj.weight": (kv_size, hidden),
            f"{attention}.o_proj.weight": (hidden, q_size),
            f"{attention}.q_norm.weight": (head_dim,),
            f"{attention}.k_norm.weight": (head_dim,),
            f"{mlp}.gate_proj.weight": (inner, hidden),
            f"{mlp}.up_proj.weight": (inner, hidden),
            f"{mlp}.down_proj.weight": (hidden, inner),
        }
        if config["attention_bias"]:
            sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": hidden}
            shapes |= {f"{attention}.{part}_proj.bias": (size,) for part, size in sizes.items()}
    return shapes


def randomise(tensors: dict[str, torch.Tensor], seed: int, std: float) -> None:
    """Fill in place, in the order of names: norms around 1, everything else with `std` around 0."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        tensor = tensors[name]
        noise = torch.randn(tensor.shape, generator=generator)
        values = 1 + 0.2 * noise if "norm" in name else std * noise
        with torch.no_grad():
            tensor.copy_(values)


def assert_close(name: str, expected: torch.Tensor, actual: torch.Tensor, ratio: float) -> None:
    """RMS of the error at most `ratio` times RMS of what is expected, and no NaN that is not expected."""
    assert expected.shape == actual.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    wanted, found = expected.double(), actual.double()
    assert not wanted.isnan().any(), f"{name}: NaN is expected, which nothing can be compared with"
    num_nan = int(found.isnan().sum())
    assert num_nan == 0, f"{name}: {num_nan} of {found.numel()} values are NaN"
    error = found - wanted
    measured = float(error.square().mean().sqrt() / wanted.square().mean().sqrt().clamp_min(1e-30))
    assert measured <= ratio, (
        f"{name}: RMS error is {measured:.3g} of the expected RMS, allowed is {ratio:.3g}; "
        f"largest error {float(error.abs().max()):.3g}"
    )
