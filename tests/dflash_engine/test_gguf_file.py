"""GGUF files as llama.cpp writes them become folders that transformers reads as the same model."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from dflash_engine import gguf_file
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.errors import ConfigError
from dflash_engine.gguf_file import cache_folder, expand_gguf
from dflash_engine.model_config import read_model_config
from dflash_engine.request import Message
from dflash_engine.rope import RopeConfig, inverse_frequencies
from dflash_engine.tokenizer import Tokenizer
from tests.helpers import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_level_tokenizer, tiny_model_folder

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))


def gguf_name(hf_name):
    stem, kind = hf_name.rsplit(".", 1)
    if stem in GLOBAL:
        return f"{GLOBAL[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.{kind}"


def llama_cpp_rows(rows, num_heads):
    """The order in which llama.cpp's converter writes q and k rows of Llama models."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, model_folder, *, quantization="F32", drop=(), extra=None, pre="gpt-2", metadata=None):
    """Write the model as llama.cpp's converter would."""
    config = json.loads((model_folder / "config.json").read_text())
    architecture = config["model_type"]
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, value in (metadata or {}).items():
        writer.add_key_value(f"{architecture}.{key}", *value)
    write_tokenizer(writer, config["vocab_size"], pre)
    tensors = {
        name: tensor.float().numpy() for name, tensor in load_file(model_folder / "model.safetensors").items()
    }
    for name, values in tensors.items():
        if architecture == "llama" and "q_proj" in name:
            values = llama_cpp_rows(values, config["num_attention_heads"])
        if architecture == "llama" and "k_proj" in name:
            values = llama_cpp_rows(values, config["num_key_value_heads"])
        if gguf_name(name) in drop:
            continue
        kind = GGMLQuantizationType[quantization if values.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer, vocab_size, pre):
    backend = json.loads(byte_level_tokenizer().backend_tokenizer.to_str())
    tokens = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].get)
    padding = [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    types = [3 if token in SPECIAL_TOKENS else 1 for token in tokens] + [5] * len(padding)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + padding)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_expanded_model_computes_what_the_original_does(tmp_path, architecture, tied):
    original = tiny_model_folder(tmp_path, architecture, tie_word_embeddings=tied)
    folder = expand_gguf(write_gguf(tmp_path / "model.gguf", original))
    assert torch.equal(logits(folder), logits(original))
    assert read_model_config(folder).tie_word_embeddings == tied
    assert read_model_config(folder).eos_token_ids == (0, 2)


def test_biases_of_llama_models_are_kept(tmp_path):
    original = tiny_model_folder(tmp_path, "llama", attention_bias=True)
    folder = expand_gguf(write_gguf(tmp_path / "model.gguf", original))
    assert torch.equal(logits(folder), logits(original))


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_quantised_weights_are_close_to_the_original(tmp_path, quantization):
    original = tiny_model_folder(tmp_path, "llama")
    folder = expand_gguf(write_gguf(tmp_path / "model.gguf", original, quantization=quantization))
    levels = {"F16": 1 << 11, "BF16": 1 << 9, "Q8_0": 1 << 7, "Q4_1": 1 << 4, "Q5_0": 1 << 4}[quantization]
    expanded = load_file(folder / "model.safetensors")
    for name, expected in load_file(original / "model.safetensors").items():
        assert expanded[name].dtype == torch.bfloat16
        error = (expanded[name].float() - expected.float()).abs().max()
        assert error <= expected.float().abs().max() * (1 / levels + 2**-8), name


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recovered_from_its_factors(tmp_path, factor):
    original = tiny_model_folder(tmp_path, "llama")
    scaled = RopeConfig(10000.0, "llama3", factor, 8192, 1.0, 4.0)
    factors = inverse_frequencies(RopeConfig(), 16) / inverse_frequencies(scaled, 16)
    extra = {"rope_freqs.weight": factors.numpy().astype(np.float32)}
    assert (
        read_model_config(expand_gguf(write_gguf(tmp_path / "a.gguf", original, extra=extra))).rope == scaled
    )
    extra["rope_freqs.weight"][3] *= 1.1
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight are not those of a Llama 3 model"):
        expand_gguf(write_gguf(tmp_path / "b.gguf", original, extra=extra))


def test_yarn_scaling_is_read(tmp_path):
    from gguf import GGUFValueType as Kind

    metadata = {
        "rope.scaling.type": ("yarn", Kind.STRING),
        "rope.scaling.factor": (4.0, Kind.FLOAT32),
        "rope.scaling.original_context_length": (128, Kind.UINT32),
    }
    path = write_gguf(tmp_path / "model.gguf", tiny_model_folder(tmp_path, "qwen2"), metadata=metadata)
    rope = read_model_config(expand_gguf(path)).rope
    assert (rope.type, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 128)


def test_the_tokenizer_of_the_file_is_the_original_one(tmp_path):
    original = tiny_model_folder(tmp_path, "llama")
    folder = expand_gguf(write_gguf(tmp_path / "model.gguf", original))
    ours, expected = Tokenizer.load(folder), Tokenizer.load(original)
    for text in ("Where is my order?", "a  b\n\n12345", "您的订单 👍", "<|im_end|>x"):
        assert ours.encode(text) == expected.encode(text)
        assert ours.decode(ours.encode(text)) == text.replace("<|im_end|>", "")
    chat = [Message("user", "Where is it?")]
    assert ours.encode_chat(chat) == expected.encode_chat(chat)
    assert ours.eos_token_ids == (2,)
    assert ours.vocab_size == expected.vocab_size


def test_qwen_s_words_are_those_of_qwen_s_own_tokenizer(tmp_path):
    folder = expand_gguf(
        write_gguf(tmp_path / "model.gguf", tiny_model_folder(tmp_path, "llama"), pre="qwen2")
    )
    backend = json.loads(byte_level_tokenizer().backend_tokenizer.to_str())["model"]
    merges: Any = [tuple(merge) for merge in backend["merges"]]
    expected: Any = Qwen2Tokenizer(vocab=backend["vocab"], merges=merges)
    ours = Tokenizer.load(folder)
    for text in (
        "Where's the  order-12345 of Monday?\r\n\r\n  You\tshould",
        "cafe\u0301 İ 您的订单已经发货。",
    ):
        assert ours.encode(text) == expected.encode(text, add_special_tokens=False)


def test_llama_3_text_begins_with_its_bos(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model_folder(tmp_path, "llama"), pre="llama-bpe")
    tokenizer = Tokenizer.load(expand_gguf(path))
    assert tokenizer.encode("Hi")[0] == 1
    assert tokenizer.encode_chat([Message("user", "Hi")]).count(1) == 2, "the template's own only"


def test_a_second_call_uses_what_the_first_one_made(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", tiny_model_folder(tmp_path, "llama"))
    first = expand_gguf(path)
    assert first.is_relative_to(cache_folder())
    monkeypatch.setattr(gguf_file, "_write", None)
    copy = tmp_path / "other name.gguf"
    copy.write_bytes(path.read_bytes())
    assert expand_gguf(copy) == first


def test_two_processes_at_once_make_one_folder(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model_folder(tmp_path, "llama"))
    code = (
        "import sys, gguf, transformers; from pathlib import Path; from dflash_engine import gguf_file; "
        "print('ready', flush=True); input(); print(gguf_file.expand_gguf(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(path)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len({output for output, _ in outputs}) == 1
    assert len(list((cache_folder() / "gguf").iterdir())) == 1
    assert torch.isfinite(logits(expand_gguf(path))).all()


def test_a_lost_race_uses_the_winner_s_folder(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", tiny_model_folder(tmp_path, "llama"))
    write = gguf_file._write

    def slow_write(source, folder):
        write(source, folder)
        monkeypatch.setattr(gguf_file, "_write", write)
        expand_gguf(source)

    monkeypatch.setattr(gguf_file, "_write", slow_write)
    folder = expand_gguf(path)
    assert list((cache_folder() / "gguf").iterdir()) == [folder]


def test_a_failed_expansion_leaves_nothing(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf", tiny_model_folder(tmp_path, "llama"), drop=("output_norm.weight",)
    )
    with pytest.raises(ConfigError, match=r"lacks tensors: output_norm\.weight"):
        expand_gguf(path)
    assert list((cache_folder() / "gguf").iterdir()) == []


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "SHARD_BYTES", 100_000)
    original = tiny_model_folder(tmp_path, "llama")
    folder = expand_gguf(write_gguf(tmp_path / "model.gguf", original))
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    checkpoint = Checkpoint(folder)
    for name, tensor in load_file(original / "model.safetensors").items():
        assert torch.equal(checkpoint.take(name, tensor.shape), tensor)
    checkpoint.finish()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"drop": ("blk.3.ffn_up.weight",)}, r"lacks tensors: blk\.3\.ffn_up\.weight"),
        ({"drop": ("token_embd.weight",)}, r"lacks tensors: token_embd\.weight"),
        (
            {"extra": {"blk.0.ffn_gate_exps.weight": np.ones(32, np.float32)}},
            "has unknown tensors: blk.0.ffn_gate_e",
        ),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not known, only gpt-2, smollm, qwen2"),
    ],
)
def test_odd_files_are_refused_in_a_sentence(tmp_path, settings, sentence):
    path = write_gguf(tmp_path / "model.gguf", tiny_model_folder(tmp_path, "llama"), **settings)
    with pytest.raises(ConfigError, match=sentence):
        expand_gguf(path)


def test_other_architectures_and_other_files_are_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.add_tensor("x", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture 'mamba' is not supported, only llama, qwen2, qwen3"):
        expand_gguf(tmp_path / "mamba.gguf")
    for content in (b"", b"GGUF", b"PK" + b"\0" * 64):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ConfigError, match="is not a readable GGUF file"):
            expand_gguf(tmp_path / "bad.gguf")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        expand_gguf(tmp_path / "gone.gguf")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "file"))
    path = write_gguf(tmp_path / "model.gguf", tiny_model_folder(tmp_path, "llama"))
    with pytest.raises(ConfigError, match=r"cannot be written .*; set DFLASH_CACHE"):
        expand_gguf(path)
