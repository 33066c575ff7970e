"""config.json of target models, in every layout that is in use."""

import json

import pytest
from transformers import AutoConfig

from dflash_engine.errors import ConfigError
from dflash_engine.model_config import read_model_config
from tests.helpers import tiny_model_folder

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


@pytest.fixture
def read(tmp_path):
    def _read(generation=None, **changes):
        config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_model_config(tmp_path)

    return _read


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_what_transformers_saves_is_read_as_transformers_means_it(tmp_path, architecture):
    folder = tiny_model_folder(tmp_path, architecture, tie_word_embeddings=True)
    config, reference = read_model_config(folder), AutoConfig.from_pretrained(folder)
    assert config.architecture == architecture
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == reference.hidden_size
    assert config.intermediate_size == reference.intermediate_size
    assert config.num_layers == reference.num_hidden_layers == len(config.windows)
    assert config.num_heads == reference.num_attention_heads
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == 16
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.max_position_embeddings == 512
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.qkv_bias == (architecture == "qwen2")
    assert config.qk_norm == architecture.startswith("qwen3")
    assert (config.experts is not None) == (architecture == "qwen3_moe")
    assert not config.o_bias
    assert not config.mlp_bias


MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def test_experts_stand_in_the_layers_that_no_key_takes_out(read):
    assert read().experts is None
    experts = read(**MOE).experts
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (8, 3, 48)
    assert experts.renormalise
    assert experts.layers == {0, 1, 2, 3}
    assert read(**MOE, decoder_sparse_step=2).experts.layers == {1, 3}
    assert read(**MOE, mlp_only_layers=[0, 3]).experts.layers == {1, 2}
    assert read(**MOE, mlp_only_layers=[0, 1, 2, 3]).experts is None
    assert read(**{**MOE, "num_experts": 0}).experts is None
    assert read(**MOE, num_local_experts=8).experts.num_experts == 8


def test_what_config_json_leaves_out_about_experts_is_as_in_transformers(read):
    experts, reference = read(model_type="qwen3_moe").experts, AutoConfig.for_model("qwen3_moe")
    assert experts.num_experts == reference.num_experts
    assert experts.top_k == reference.num_experts_per_tok
    assert experts.intermediate_size == reference.moe_intermediate_size
    assert experts.renormalise == reference.norm_topk_prob


def test_numbers_of_experts_that_cannot_be_are_refused(read):
    with pytest.raises(ConfigError, match="num_experts_per_tok 9 is more than the 8 experts"):
        read(**{**MOE, "num_experts_per_tok": 9})
    with pytest.raises(ConfigError, match="2048 experts are not supported, at most 1024"):
        read(**{**MOE, "num_experts": 2048})
    with pytest.raises(ConfigError, match="decoder_sparse_step"):
        read(**MOE, decoder_sparse_step=0)


def test_a_window_of_a_model_with_experts_is_one_for_all_layers(read):
    assert read(**MOE, sliding_window=64).windows == (None,) * 4
    windowed = read(**MOE, sliding_window=64, use_sliding_window=True, max_window_layers=2)
    assert windowed.windows == (64,) * 4


def test_biases_follow_the_architecture(read):
    llama = read(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = read(model_type="qwen2", attention_bias=False)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    qwen3 = read(model_type="qwen3", attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, False)


def test_defaults_hold_where_keys_are_absent(read):
    config = read(num_key_value_heads=..., rms_norm_eps=..., rope_theta=..., max_position_embeddings=...)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rms_norm_eps, config.rope.theta, config.max_position_embeddings) == (1e-6, 10000.0, 2048)
    assert not config.tie_word_embeddings
    assert read(model_type="qwen3").head_dim == 128


def test_rope_theta_is_found_in_every_layout(read):
    flat = {"rope_theta": 7000.0, "rope_type": "default"}
    assert read().rope.theta == 500000.0
    assert read(rope_theta=..., rope_parameters=flat).rope.theta == 7000.0
    nested = {"full_attention": flat, "sliding_attention": flat}
    assert read(rope_theta=..., rope_parameters=nested).rope.theta == 7000.0
    scaled = read(rope_scaling={"type": "linear", "factor": 2.0}).rope
    assert (scaled.type, scaled.factor, scaled.theta) == ("linear", 2.0, 500000.0)


def test_different_rope_for_layer_types_is_refused(read):
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ConfigError, match="differ between layer types"):
        read(rope_parameters=nested)


def test_end_tokens_come_from_both_files(read):
    assert read(eos_token_id=[9, 7], generation={"eos_token_id": [7, 5]}).eos_token_ids == (5, 7, 9)
    assert read(eos_token_id=None, generation={"eos_token_id": 3}).eos_token_ids == (3,)
    assert read(eos_token_id=None, generation={}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 1}, (None,) * 4),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 32)),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 28}, (None,) * 4),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_qwen_windows_stand_where_the_checkpoint_puts_them(read, keys, windows):
    assert read(model_type="qwen2", **keys).windows == windows


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": ...}, "hidden_size: Field required"),
        ({"vocab_size": "many"}, "vocab_size: Input should be a valid integer"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported, only llama, qwen2, qwen3"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "is a DFlash draft, not a model"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 4}, "'linear_attention' is not"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "no sliding_window is set"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_cannot_work_is_named(read, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(**changes)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        read_model_config(tmp_path)
