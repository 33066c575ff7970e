"""Which operations are chosen, and what happens where they cannot be built or do not keep their word."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_engine.errors import ConfigError
from dflash_engine.ops import Sizes, choose_ops
from kernels.reference import ReferenceOps

CPU = torch.device("cpu")
SIZES = Sizes(((48, 32), (32, 48)), (16,))


def test_auto_takes_the_kernels_where_they_cover_the_model() -> None:
    assert choose_ops("auto", CPU, torch.bfloat16, 1, SIZES).name == "cpu"
    assert choose_ops("cpu", CPU, torch.bfloat16, 1, SIZES).name == "cpu"
    assert choose_ops("reference", CPU, torch.bfloat16, 1, SIZES).name == "reference"


@pytest.mark.parametrize(
    ("sizes", "named"),
    [(Sizes(((48, 40),), (16,)), "40"), (Sizes(((48, 32),), (16, 48)), "48")],
    ids=["width", "head size"],
)
def test_sizes_without_a_kernel_are_named(sizes: Sizes, named: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_ops("auto", CPU, torch.float32, 1, sizes).name == "reference"
    assert named in caplog.text and "slower" in caplog.text
    with pytest.raises(ConfigError, match=named):
        choose_ops("cpu", CPU, torch.float32, 1, sizes)


CHOOSE = """
import torch
from dflash_engine.errors import ConfigError
from dflash_engine.ops import Sizes, choose_ops
sizes = Sizes(((48, 32),), (16,))
print(choose_ops("auto", torch.device("cpu"), torch.float32, 1, sizes).name)
try:
    choose_ops("cpu", torch.device("cpu"), torch.float32, 1, sizes)
except ConfigError as error:
    print("refused:", error)
"""


def compiler_that_fails(tmp_path: Path) -> dict[str, str]:
    return {"CXX": "/bin/false", "DFLASH_CACHE": str(tmp_path / "cache")}


def compiler_that_is_not_there(tmp_path: Path) -> dict[str, str]:
    return {"CXX": str(tmp_path / "no-such-compiler"), "DFLASH_CACHE": str(tmp_path / "cache")}


def no_compiler_at_all(tmp_path: Path) -> dict[str, str]:
    return {"CXX": "", "PATH": str(tmp_path), "DFLASH_CACHE": str(tmp_path / "cache")}


def cache_that_cannot_be_written(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").write_text("in the way")
    return {"DFLASH_CACHE": str(tmp_path / "file")}


@pytest.mark.parametrize(
    "broken",
    [
        compiler_that_fails,
        compiler_that_is_not_there,
        no_compiler_at_all,
        cache_that_cannot_be_written,
    ],
)
def test_without_kernels_auto_falls_back_with_a_warning_and_cpu_is_refused(
    broken: object, tmp_path: Path
) -> None:
    assert callable(broken)
    done = subprocess.run(
        [sys.executable, "-c", CHOOSE],
        env={**os.environ, **broken(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    first, second = done.stdout.splitlines()[:2]
    assert first == "reference"
    assert second.startswith("refused: the CPU kernels cannot be compiled")
    assert "slower" in done.stderr


def test_tiles_shrink_to_one_row_where_torchs_rows_depend_on_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = F.linear

    def depends_on_company(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(x, weight, bias) * (1 + 1e-6 * x[1:].abs().sum())

    taken = choose_ops("reference", CPU, torch.float32, 1, SIZES)
    assert isinstance(taken, ReferenceOps) and taken.tile == 16
    monkeypatch.setattr(F, "linear", depends_on_company)
    taken = choose_ops("reference", CPU, torch.float32, 1, SIZES)
    assert isinstance(taken, ReferenceOps) and taken.tile == 1


def test_tiles_shrink_where_only_one_place_of_a_tile_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.linear

    def depends_on_place(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = plain(x, weight, bias)
        if len(out) == 16 and out.shape[1] == 32:
            out[15] *= 1 + 1e-6
        return out

    monkeypatch.setattr(F, "linear", depends_on_place)
    taken = choose_ops("reference", CPU, torch.float32, 1, SIZES)
    assert isinstance(taken, ReferenceOps) and taken.tile == 1


def test_a_matmul_that_never_repeats_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = F.linear, iter(range(1, 10_000))

    def drifts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(x, weight, bias) * (1 + 1e-5 * next(calls))

    monkeypatch.setattr(F, "linear", drifts)
    with pytest.raises(ConfigError, match="call to call"):
        choose_ops("reference", CPU, torch.float32, 1, SIZES)
