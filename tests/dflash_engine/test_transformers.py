"""In float32 our greedy tokens are those of transformers' `generate` on the same weights."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_engine import DFlashEngine, Request, SamplingParams
from tests.helpers import tiny_model_folder

CLOSE_CALL = 1e-4
"""Where the two best logits are closer than this, either token is right."""


def transformers_tokens(model: Any, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in generated[0, len(prompt) :]]


def margin(model: Any, tokens: tuple[int, ...]) -> float:
    """How far apart the two best logits are for the token behind `tokens`."""
    with torch.inference_mode():
        best, second = model(torch.tensor([tokens])).logits[0, -1].topk(2).values.tolist()
    return float(best - second)


def assert_same_tokens(model: Any, prompt: tuple[int, ...], ours: tuple[int, ...], theirs: list[int]) -> None:
    """Equal, or parted at a close call, which is listed; behind it the two speak of different texts."""
    assert len(ours) == len(theirs)
    parted = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    if parted is None:
        return
    gap = margin(model, (*prompt, *theirs[:parted]))
    print(f"parted at answer token {parted}: {ours[parted]} or {theirs[parted]}, logits {gap:.2e} apart")
    assert gap < CLOSE_CALL, (
        f"token {parted} is {ours[parted]}, transformers says {theirs[parted]} by {gap:.2e}"
    )


def loaded(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": LINEAR, "head_dim": 32}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {}),
        (
            "qwen3",
            {"tie_word_embeddings": True, "head_dim": 32, "num_attention_heads": 6, "rope_parameters": YARN},
        ),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3, "mlp_only_layers": [1]}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_tiny_models_with_every_option_speak_as_in_transformers(tmp_path, architecture, overrides, ops):
    folder = str(tiny_model_folder(tmp_path, architecture, dtype=torch.float32, **overrides))
    engine = DFlashEngine(
        folder, draft=None, dtype="float32", ops=ops, max_model_len=256, kv_cache_tokens=2000, threads=1
    )
    model = loaded(folder)
    noise = random.Random(3)
    prompts = [tuple(noise.randrange(3, 300) for _ in range(length)) for length in (1, 5, 33, 100)]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    results = engine.generate([Request(token_ids=prompt, sampling=params) for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        assert_same_tokens(model, prompt, result.tokens, transformers_tokens(model, prompt, 48))
    assert len({result.tokens for result in results}) == len(prompts)
