"""The benchmark of the kernels without a GPU: its cases on tiny shapes, and what it refuses to time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_engine import kernel_bench
from dflash_engine.kernel_cases import Case, Place, add_linear, model_cases, rms_norm
from dflash_engine.kernel_cases_attention import other_cases
from dflash_engine.kernel_timing import Ceilings, check
from dflash_engine.ops import ReferenceOps, TritonOps
from jobs import bench_kernels
from tests.dflash_engine.tiny_shapes import write_shapes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACE = Place(DEVICE, torch.bfloat16)
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "head_dim": 16,
}


def cases(tmp_path: Path, rows: int, **changes: object) -> list[Case]:
    model, draft = kernel_bench.read_shapes(str(write_shapes(tmp_path, **changes)), "auto")
    return [*model_cases(model, draft, rows, PLACE), *other_cases(model, draft, rows, PLACE)]


@pytest.fixture(autouse=True)
def short_context(monkeypatch):
    monkeypatch.setattr("dflash_engine.kernel_cases_attention.CONTEXT", 20)


def test_every_kernel_of_a_model_passes_its_check(tmp_path):
    found = cases(tmp_path, 4)
    assert [case.name.split()[0] for case in found] == [
        *("rms_norm", "qkv", "o", "gate_up", "down", "head", "context"),
        *("attention", "attention", "choose"),
    ]
    for case in found:
        result = check(case, TritonOps(DEVICE), torch.bfloat16, DEVICE)
        assert result.passed and result.rows_alone, f"{case.name}: {result}"


def test_a_model_with_experts_has_them_in_place_of_the_dense_mlp(tmp_path):
    found = {case.name.split()[0]: case for case in cases(tmp_path, 3, **EXPERTS)}
    assert {"experts", "qkv"} <= found.keys() and "gate_up" not in found
    for name in ("experts", "qkv"):
        assert check(found[name], TritonOps(DEVICE), torch.bfloat16, DEVICE).passed


def test_plain_torch_computes_the_same(tmp_path):
    for case in cases(tmp_path, 4):
        if case.name.split()[0] in ("rms_norm", "o", "gate_up", "down", "attention"):
            expected = case.build(ReferenceOps(16))(torch.arange(case.rows, device=DEVICE))
            found = case.plain()()
            if "verify" in case.name:  # [sequences, heads, rows, head] there
                found = found.transpose(1, 2)
            found = found.reshape(case.rows, -1)
            if "attention" in case.name:
                assert found.shape == expected.shape  # its keys are laid out otherwise
            else:
                torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


class Wrong(TritonOps):
    """Rows one part in fifty too large."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps) * 1.02


class Dependent(TritonOps):
    """The last bit of a row depends on how many there are."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        right = super().rms_norm(x, weight, eps)
        return right if len(x) > 1 else torch.nextafter(right, right + 1)


class Silent(TritonOps):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.full_like(x, torch.nan)


@pytest.mark.parametrize("ops", [Wrong, Dependent, Silent])
def test_what_is_wrong_or_depends_on_other_rows_fails_and_is_not_timed(ops, monkeypatch):
    monkeypatch.setattr(kernel_bench, "kernel_s", lambda *_: pytest.fail("timed"))
    line = kernel_bench.measured(rms_norm(5, 32, PLACE), ops(DEVICE), PLACE, Ceilings(1.0, 1.0), 1)
    assert line["passed"] is False
    assert "seconds" not in line
    assert line["rows_alone"] == (ops is Wrong)


def test_a_share_is_of_the_ceiling_that_binds(monkeypatch):
    monkeypatch.setattr(kernel_bench, "kernel_s", lambda *_: 2.0)
    monkeypatch.setattr(kernel_bench, "plain_s", lambda *_: 3.0)
    case = replace(add_linear("o", 1, 16, 16, PLACE), num_bytes=100, num_flops=60)
    for reached, share in (
        (Ceilings(100.0, 100.0), 0.5),
        (Ceilings(1000.0, 60.0), 0.5),
        (Ceilings(50.0, 60.0), 1.0),
    ):
        line = kernel_bench.measured(case, TritonOps(DEVICE), PLACE, reached, 1)
        assert (line["share"], line["times_torch"], line["bytes_per_s"]) == (share, 1.5, 50.0)


LINE = {"kernel": "o 4x4", "rows": 1, "error": 1e-3, "rows_alone": True, "passed": True, "seconds": 1e-5}
LINE |= {"bytes_per_s": 1e12, "flops_per_s": 1e12, "share": 0.5, "times_torch": None}


@pytest.mark.parametrize(("changes", "status"), [({}, 0), ({"passed": False, "rows_alone": False}, 1)])
def test_the_exit_code_says_whether_all_checks_passed(capsys, monkeypatch, tmp_path, changes, status):
    result = {"kernels": [LINE, LINE | changes], "ceilings": {"bytes_per_s": 4e12, "flops_per_s": 7e14}}
    monkeypatch.setattr(bench_kernels, "measure", lambda *_: result)
    out = tmp_path / "out.json"
    assert bench_kernels.main(["--json", str(out)]) == status
    *printed, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == json.loads(out.read_text())
    assert json.loads(last)["passed"] == (status == 0)
    assert ("FAILED" in printed[2]) == (status == 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys):
    assert bench_kernels.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--rows", "0"], ["--rows", "a"], ["--repeats", "0"]])
def test_senseless_arguments_are_refused(capsys, argv):
    with pytest.raises(SystemExit) as refused:
        bench_kernels.main(argv)
    assert refused.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_with_exit_code_2(capsys):
    assert bench_kernels.main(["--model", "./nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
