"""Weights: what is missing, misshapen or left over is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_engine.checkpoint import Checkpoint
from dflash_engine.errors import ConfigError
from tests.helpers import tiny_draft_folder, tiny_model_folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("target"), "llama")


def test_every_tensor_comes_as_it_was_saved(target_folder):
    saved = load_file(target_folder / "model.safetensors")
    checkpoint = Checkpoint(target_folder)
    for name, tensor in saved.items():
        taken = checkpoint.take(name, tensor.shape)
        assert taken.dtype == torch.bfloat16
        assert torch.equal(taken, tensor)
    checkpoint.finish()


def test_shards_are_one_checkpoint(tmp_path, target_folder):
    sharded = tiny_model_folder(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    saved = load_file(target_folder / "model.safetensors")
    checkpoint = Checkpoint(sharded)
    assert all(torch.equal(checkpoint.take(name, tensor.shape), tensor) for name, tensor in saved.items())
    checkpoint.finish()


def test_several_files_without_an_index_are_one_checkpoint(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.take("a", (2,)), torch.ones(2))
    assert torch.equal(checkpoint.take("b", (3,)), torch.zeros(3))
    checkpoint.finish()


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("asked", ["", "model."])
def test_the_prefix_may_be_there_or_not(tmp_path, target_folder, prefix, asked):
    folder = tiny_draft_folder(tmp_path, target_folder, prefix=prefix)
    checkpoint = Checkpoint(folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        bare = asked + name.removeprefix("model.")
        assert checkpoint.has(bare)
        assert torch.equal(checkpoint.take(bare, tensor.shape), tensor)
    checkpoint.finish()


def test_a_missing_tensor_is_named_with_its_shape(target_folder):
    with pytest.raises(ConfigError, match=r"tensor model\.extra\.weight \[3, 4\] is missing in"):
        Checkpoint(target_folder).take("model.extra.weight", (3, 4))


def test_a_misshapen_tensor_is_named_with_both_shapes(target_folder):
    with pytest.raises(
        ConfigError, match=r"tensor lm_head\.weight in .* is \[320, 64\].* asks for \[100, 64\]"
    ):
        Checkpoint(target_folder).take("lm_head.weight", (100, 64))


def test_tensors_never_taken_are_listed(tmp_path):
    tensors = {f"odd.{i}": torch.ones(1) for i in range(10)}
    tensors |= {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1), "lm_head.weight": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no use for: odd\.0, odd\.1, .*odd\.7 and 2 more$"):
        Checkpoint(tmp_path).finish(ignore=("lm_head.weight",))
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        Checkpoint(tmp_path).finish()


def test_harmless_leftovers_are_no_error(tmp_path):
    leftovers = {"model.rotary_emb.inv_freq": torch.ones(1), "lm_head.weight": torch.ones(1)}
    save_file(leftovers, tmp_path / "model.safetensors")
    Checkpoint(tmp_path).finish(ignore=("lm_head.weight",))


def test_quantised_tensors_are_refused(tmp_path):
    tensors = {"int": torch.ones(2, dtype=torch.int8), "fp8": torch.ones(2).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "model.safetensors")
    for name in tensors:
        with pytest.raises(ConfigError, match=f"{name} in .* is torch.*quantised weights are not supported"):
            Checkpoint(tmp_path).take(name, (2,))


def test_a_name_in_two_files_is_refused(tmp_path):
    for file in ("one.safetensors", "two.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / file)
    with pytest.raises(ConfigError, match=r"tensor a stands in .*one\.safetensors and in .*two\.safetensors"):
        Checkpoint(tmp_path)


def test_folders_without_readable_weights_say_why(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds no \.safetensors files"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pickled PyTorch weights only.*convert them to safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read as safetensors"):
        Checkpoint(tmp_path)


def test_an_index_is_not_trusted(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, sentence in (
        ({}, "has no weight_map"),
        ({"a": "../elsewhere.safetensors"}, "names files outside of its folder"),
        ({"a": "gone.safetensors"}, r"gone\.safetensors cannot be read"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match=sentence):
            Checkpoint(tmp_path)
