"""RoPE tables against transformers' own."""

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_engine.errors import ConfigError
from dflash_engine.rope import RopeConfig, inverse_frequencies, parse_rope, rope_tables

WHERE = Path("config.json")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3.2": {**LLAMA3, "factor": 32.0},
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 1.25},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn-not-truncated": {**YARN, "truncate": False},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_tables_equal_those_of_transformers(scaling, head_dim):
    parameters = {"rope_theta": 500000.0, **scaling}
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    length = 300
    reference = LlamaRotaryEmbedding(config)
    expected_cos, expected_sin = reference(torch.empty(1, dtype=torch.float32), torch.arange(length)[None])

    rope = parse_rope(parameters, 131072, WHERE)
    cos, sin = rope_tables(rope, head_dim, length)

    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (length, head_dim // 2)
    # The reference computes in float32: its angles are off by one part in 2^23 of 300 radians.
    torch.testing.assert_close(cos, expected_cos[0, :, : head_dim // 2], atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, expected_sin[0, :, : head_dim // 2], atol=1e-4, rtol=0)
    frequencies = inverse_frequencies(rope, head_dim)
    torch.testing.assert_close(frequencies.float(), reference.inv_freq, rtol=1e-6, atol=0)


def test_far_positions_keep_their_angle():
    cos, sin = rope_tables(RopeConfig(), 4, 100_001)
    assert cos[100_000, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)
    assert sin[100_000, 1].item() == pytest.approx(math.sin(1_000), abs=1e-7)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope"])
def test_an_unknown_type_is_named(kind):
    with pytest.raises(ConfigError, match=f"'{kind}'.*default, linear, llama3 and yarn"):
        parse_rope({"rope_type": kind, "factor": 2.0}, 2048, WHERE)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"rope_type": "linear"}, "factor of RoPE type linear is None"),
        ({"rope_theta": "10000"}, "rope_theta of RoPE type default is '10000'"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor 4.0 is not below high_freq_factor 4.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_a_wrong_value_is_named(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_rope(keys, 2048, WHERE)
