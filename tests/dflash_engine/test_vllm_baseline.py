"""What we ask of vLLM and make of its answers, with a stand-in for it: it cannot be installed beside us."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dflash_engine.benchmarking import Counts, run
from dflash_engine.errors import ConfigError
from dflash_engine.vllm_baseline import VllmBaseline, VllmSettings
from tests.dflash_engine.tiny_shapes import write_shapes


class Engine:
    """One token for the prompt, then three a step; ids come back with a suffix, as in some versions."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[int, Any, int]] = {}
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, key: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.running[key] = (prompt["prompt_token_ids"][0], params, 0)

    def step(self) -> list[Any]:
        outputs = []
        for key, (said, params, given) in list(self.running.items()):
            num = min(3 if given else 1, params.max_tokens - given)
            done = given + num == params.max_tokens
            self.running[key] = (said, params, given + num)
            if done:
                del self.running[key]
            tokens = SimpleNamespace(token_ids=[said] * num)
            outputs.append(SimpleNamespace(request_id=f"{key}-0a1b", outputs=[tokens], finished=done))
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, keys: list[str]) -> None:
        for key in keys:
            self.running.pop(key, None)


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """What vLLM engines were asked for, in order."""
    found: list[dict[str, Any]] = []

    class LLM:
        def __init__(self, **settings: Any) -> None:
            if settings["gpu_memory_utilization"] > 0.8:
                raise ValueError("no room")
            found.append(settings)
            self.llm_engine = Engine()

    vllm, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vars(vllm).update(LLM=LLM, SamplingParams=SimpleNamespace, __version__="0")
    vars(sampling).update(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.setenv(name, "1")  # so that it is as before, after the test
    return found


def settings(model: object, **changes: Any) -> VllmSettings:
    values = {"model": str(model), "draft": None, "dtype": "bfloat16", "max_num_seqs": 8, "max_model_len": 99}
    return VllmSettings(**values | {"gpu_memory_utilization": 0.3} | changes)


def test_tokens_steps_and_drafts_are_counted(asked, tmp_path):
    folder = write_shapes(tmp_path)
    vllm = VllmBaseline(settings(folder, draft=str(folder / "draft")))
    measured = run(vllm, [(4,), (5,), (6,)], 8, 2)
    assert [answer.tokens for answer in measured.answers] == [(4,) * 8, (5,) * 8, (6,) * 8]
    # Blocks of 4: 3 drafted in each of 3 steps; of the last step's tokens one is left.
    assert measured.counts == Counts(steps=9, drafted=27, accepted=3 * (2 + 2 + 0))
    assert asked[0]["speculative_config"] == {
        "method": "dflash",
        "model": str(folder / "draft"),
        "num_speculative_tokens": 3,
    }
    assert asked[0]["enable_prefix_caching"] is False
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_aborted_requests_leave_nothing_running(asked, tmp_path):
    vllm = VllmBaseline(settings(write_shapes(tmp_path)))
    keys = [vllm.submit((1,), 9), vllm.submit((2,), 9)]
    vllm.step()
    vllm.abort(keys)
    assert run(vllm, [(3,)], 4, 1).answers[0].tokens == (3,) * 4


def test_random_weights_are_its_own_and_without_a_draft(asked, tmp_path):
    folder = write_shapes(tmp_path)
    VllmBaseline(settings(folder, weights="random"))
    assert asked[0]["load_format"] == "dummy" and asked[0]["speculative_config"] is None
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        VllmBaseline(settings(folder, weights="random", draft=str(folder / "draft")))


def test_what_vllm_refuses_is_told_in_one_sentence(asked, tmp_path):
    with pytest.raises(ConfigError, match="vLLM 0 does not start: no room"):
        VllmBaseline(settings(write_shapes(tmp_path), gpu_memory_utilization=0.9))
