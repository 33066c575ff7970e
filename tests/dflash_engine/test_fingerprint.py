"""Fingerprints change with all that decides an answer, and with nothing else."""

import dataclasses
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_engine import fingerprint
from dflash_engine.errors import ConfigError
from dflash_engine.fingerprint import Fingerprint, device_kind, triton_version, weights_digest
from tests.helpers import tiny_model_folder

FINGERPRINT = Fingerprint(
    weights="ab",
    dtype="bfloat16",
    device="cuda sm_90",
    kernels="1",
    tensor_parallel_size=1,
    torch="2.13.0",
    triton="",
    grammars="1",
)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Fingerprint)])
def test_every_field_changes_the_digest(field):
    change: Any = {field: 2 if field == "tensor_parallel_size" else "other"}
    other = dataclasses.replace(FINGERPRINT, **change)
    assert other.digest != FINGERPRINT.digest
    assert dataclasses.replace(FINGERPRINT).digest == FINGERPRINT.digest
    assert len(FINGERPRINT.digest) == 16


def test_a_copy_of_a_model_has_its_digest(tmp_path):
    folder = tiny_model_folder(tmp_path, "llama")
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("not a weight")
    assert weights_digest(copy) == weights_digest(folder)
    assert weights_digest(tiny_model_folder(tmp_path, "llama", seed=7)) != weights_digest(folder)


def flip_last_bit(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_one_bit_changes_the_digest(tmp_path, file):
    folder = tiny_model_folder(tmp_path, "llama")
    before = weights_digest(folder)
    flip_last_bit(folder / file, (folder / file).stat().st_size // 2)
    assert weights_digest(folder) != before


def test_large_models_are_sampled_from_the_first_byte_to_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "FULL_BYTES", 1 << 16)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 1 << 10)
    monkeypatch.setattr(fingerprint, "NUM_SAMPLES", 8)
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1 << 16)}, path)
    size = path.stat().st_size
    digests = {weights_digest(tmp_path)}
    for offset in (20, size // 7 * 3 + 100, size - 1):
        flip_last_bit(path, offset)
        digests.add(weights_digest(tmp_path))
    assert len(digests) == 4, "header, a middle sample and the end all count"
    with path.open("ab") as file:
        file.write(b"\0")
    assert weights_digest(tmp_path) not in digests, "the size counts"


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no"):
        weights_digest(tmp_path)


def test_the_cpu_is_named_by_what_it_computes_with():
    kind = device_kind(torch.device("cpu"))
    assert kind.startswith("cpu ")
    assert torch.backends.cpu.get_cpu_capability() in kind
    assert isinstance(triton_version(), str)
