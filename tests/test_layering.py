"""The law of imports: jobs -> pipelines -> dflash_engine -> kernels, never back."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "jobs": {"pipelines", "dflash_engine"},
    "pipelines": {"pipelines", "dflash_engine"},
    "dflash_engine": {"dflash_engine"},
    "kernels": {"kernels"},
}
"""Of our own packages. `dflash_engine/ops.py` alone may also import kernels."""
NEVER = {
    "pipelines": {"torch", "triton"},
    "dflash_engine": {"ray", "boto3", "fastapi", "starlette", "requests", "httpx", "aiohttp"},
    "kernels": {"ray", "transformers"},
}
"""The engine knows nothing of Ray, HTTP and object stores, the pipelines nothing of CUDA."""
SOURCES = [path for layer in MAY_IMPORT for path in sorted((ROOT / layer).rglob("*.py"))]
JOBS = [path for path in SOURCES if path.parent.name == "jobs"]


def imported(source: str, package: str) -> Iterator[str]:
    """Top-level names that `source`, a module in `package`, imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield package.split(".")[0] if node.level else (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value).split(".")[0]


def broken_laws(path: Path, source: str) -> list[str]:
    layer = path.parts[0]
    allowed = MAY_IMPORT[layer] | ({"kernels"} if path.as_posix() == "dflash_engine/ops.py" else set())
    forbidden = (MAY_IMPORT.keys() - allowed) | NEVER.get(layer, set()) | {"tests"}
    if layer == "jobs":
        ours = {"pipelines", "dflash_engine"}
        return sorted(name for name in imported(source, layer) if name not in ours | sys.stdlib_module_names)
    return sorted(forbidden.intersection(imported(source, layer)))


def test_there_is_something_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} >= MAY_IMPORT.keys() - {"kernels"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_follow_the_law(path: Path):
    assert broken_laws(path.relative_to(ROOT), path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "broken"),
    [
        ("dflash_engine/x.py", "import pipelines.read", ["pipelines"]),
        ("dflash_engine/x.py", "def f():\n    from ray import data", ["ray"]),
        ("dflash_engine/x.py", "from kernels.accept import accept", ["kernels"]),
        ("dflash_engine/ops.py", "from kernels.accept import accept", []),
        ("dflash_engine/models/ops.py", "from kernels.accept import accept", ["kernels"]),
        ("dflash_engine/x.py", "from .errors import EngineError", []),
        ("pipelines/x.py", "import importlib\nimportlib.import_module('torch.nn')", ["torch"]),
        ("pipelines/x.py", "from jobs import batch_generate", ["jobs"]),
        ("pipelines/x.py", "from tests import helpers", ["tests"]),
        ("kernels/x.py", "from dflash_engine.errors import EngineError", ["dflash_engine"]),
        ("jobs/x.py", "import argparse, rich\nfrom pipelines.batch import run", ["rich"]),
    ],
)
def test_a_broken_law_is_seen(path: str, source: str, broken: list[str]):
    assert broken_laws(Path(path), source) == broken


@pytest.mark.parametrize("package", ["dflash_engine", "pipelines"])
def test_importing_a_package_loads_neither_torch_nor_ray(package: str):
    code = f"import {package}, sys; print(sorted({{'torch', 'ray', 'transformers'}} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_a_job_defines_no_class_and_hides_no_module(path: Path):
    # A class in a job is pickled by value, as part of __main__; and the folder of the job stands first on
    # the driver's sys.path, where a job named like another module would be imported in its place.
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    assert path.stem not in sys.stdlib_module_names
