"""What must hold of the environment, so that a wrong one is seen here and not in a job."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
PINS = [
    Requirement(line)
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
LAYERS = ("kernels", "dflash_engine", "pipelines", "jobs")
PRODUCT = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]


def test_no_installed_package_is_called_kernels():
    # It would hide our folder of that name, and has broken transformers by itself.
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


def test_kernels_is_a_namespace_that_shadows_nothing():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is not None and spec.origin is None
    assert str(ROOT / "kernels") in list(spec.submodule_search_locations or [])


def test_transformers_does_not_take_our_folder_for_the_kernels_package():
    code = (
        "from transformers.utils.import_utils import is_kernels_available as probe\n"
        "import transformers.modeling_utils\n"
        "print(probe())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # as Ray sets it in driver and workers
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout.strip()) == (0, "False"), answer.stderr


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_the_installed_version_is_in_range(requirement: Requirement):
    assert requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)


def test_every_dependency_is_pinned_inside_its_range():
    pins = {canonicalize_name(pin.name): pin for pin in PINS}
    for requirement in DIRECT:
        (pin,) = pins[canonicalize_name(requirement.name)].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} does not admit {pin.version}"


def test_every_public_name_of_the_engine_can_be_imported():
    engine = importlib.import_module("dflash_engine")
    assert engine.__all__
    assert [name for name in engine.__all__ if not hasattr(engine, name)] == []


@pytest.mark.parametrize(
    "allocation",
    ["torch.empty(3)", "torch.empty_like(torch.ones(3))", "torch.ones(2).new_empty(3)"],
)
def test_memory_that_our_code_leaves_unwritten_is_nan_in_tests(allocation: str):
    assert eval(allocation, {"__name__": "dflash_engine.anything", "torch": torch}).isnan().all()


def test_an_index_that_was_never_written_points_outside_of_everything():
    code = "torch.empty(3, dtype=torch.int64)"
    indices = eval(code, {"__name__": "dflash_engine.anything", "torch": torch})
    assert indices.tolist() == [2**63 - 1] * 3


def test_files_stay_short_enough_to_read():
    too_long = {
        path.relative_to(ROOT).as_posix(): lines
        for path in PRODUCT
        if (lines := len(path.read_text().splitlines())) > 350
    }
    assert too_long == {}
