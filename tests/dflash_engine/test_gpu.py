"""The first promise on a CUDA device: rounds ahead of the host, in captured graphs, with our own kernels."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dflash_engine import DFlashEngine, Request, SamplingParams
from dflash_engine.gpu_runner import GpuRunner
from tests.dflash_engine.device_kv import assert_kv_does_not_depend_on_the_way
from tests.dflash_engine.device_ops import drafts_that_are_often_right
from tests.dflash_engine.exactness import (
    SAMPLINGS,
    assert_every_way_gives_the_same,
    one_at_a_time,
    together,
    with_sampling,
)
from tests.dflash_engine.prompts import conversations
from tests.dflash_engine.test_exactness import prompts
from tests.dflash_engine.test_transformers import assert_same_tokens, loaded, transformers_tokens
from tests.helpers import tiny_draft_folder, tiny_model_folder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {
    "device": "cuda", "ops": "triton", "max_model_len": 160, "kv_cache_tokens": 4000, "max_num_seqs": 16,
    "max_step_tokens": 128, "verify": "block",
}  # fmt: skip
"""Small steps: an engine measures each size of them when it starts."""
CASES = [("llama", "bfloat16"), ("qwen3", "bfloat16"), ("qwen3_moe", "bfloat16"), ("llama", "float32")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    made = {}
    for architecture in ("llama", "qwen3", "qwen3_moe"):
        target = tiny_model_folder(tmp_path_factory.mktemp(architecture), architecture)
        made[architecture] = {"model": str(target), "draft": str(tiny_draft_folder(target.parent, target))}
    return made


def num_graphs(engine: DFlashEngine) -> int:
    runner = engine._core._pipeline._runner
    assert isinstance(runner, GpuRunner)
    return len(runner._graphs)


@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_every_way_of_running_gives_the_tokens_of_plain_decoding_one_at_a_time(
    architecture: str, dtype: str, folders: dict[str, dict[str, str]]
) -> None:
    """Also of verifying blocks that are right, as a trained draft's are, and of rounds without graphs."""
    folder, settings = folders[architecture], SETTINGS | {"dtype": dtype}
    build = partial(DFlashEngine, folder["model"], **settings)
    requests = with_sampling(prompts(len(SAMPLINGS)), list(SAMPLINGS), 24)
    wanted = assert_every_way_gives_the_same(build, requests, 224, folder["draft"])
    assert len({tokens for tokens, *_ in wanted}) == len(requests)
    right = {request.token_ids: tokens for request, (tokens, *_) in zip(requests, wanted, strict=True)}
    # What is drafted is overwritten from the host, which a captured draft would not notice.
    eager = {"cuda_graphs": False, "draft": folder["draft"], "prefix_caching": False}
    with drafts_that_are_often_right(right) as made:
        engine = build(**eager)
        assert num_graphs(engine) == 0
        assert together(engine, requests) == wanted
        assert one_at_a_time(engine, requests[:4]) == wanted[:4]
        tight = build(**(eager | {"kv_cache_tokens": 224, "kv_block_size": 4}))
        assert together(tight, requests) == wanted
    stats = engine.stats()
    assert made and tight.stats().preemptions > 0
    assert stats.accepted_tokens > 0.2 * stats.drafted_tokens
    plain = build(cuda_graphs=False, draft=None)
    assert num_graphs(plain) == 0 and together(plain, requests) == wanted


def test_a_policy_that_measures_gives_the_same_answers(folders: dict[str, dict[str, str]]) -> None:
    settings = SETTINGS | {"verify": "adaptive", "max_step_tokens": 256}
    requests = with_sampling(prompts(24), ["greedy", "temperature", "everything", "presence"], 40)
    plain = DFlashEngine(**(folders["llama"] | SETTINGS | {"draft": None}))
    wanted = one_at_a_time(plain, requests)
    engine = DFlashEngine(**folders["llama"], **settings)
    assert num_graphs(engine) > 0
    for _ in range(3):
        assert together(engine, requests) == wanted


def test_nothing_is_compiled_once_an_engine_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compilation holds up every stream for a second: rows in any number, far and near, with and without
    drafts, beside a long prompt."""
    target = tiny_model_folder(tmp_path, "llama", max_position_embeddings=4096)
    sizes = {"max_model_len": 4000, "kv_cache_tokens": 12_000, "max_step_tokens": 512}
    draft = str(tiny_draft_folder(tmp_path, target))
    engines = [DFlashEngine(str(target), **(SETTINGS | sizes | {"draft": each})) for each in (draft, None)]
    compiled: list[str] = []

    def noticed(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", noticed)
    noise = random.Random(0)
    for engine in engines:
        for num in (1, 2, 3, 5, 11):
            requests = [
                Request(
                    token_ids=tuple(noise.randrange(3, 300) for _ in range(noise.choice([1, 30, 700, 3000]))),
                    sampling=SamplingParams(max_tokens=40, ignore_eos=True),
                )
                for _ in range(num)
            ]
            together(engine, requests)
    assert not compiled


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_any_number_of_sequences_can_be_the_most(
    max_num_seqs: int, folders: dict[str, dict[str, str]]
) -> None:
    """A model shorter than a step too: what is measured at the start has to stay inside of it."""
    settings = SETTINGS | {"max_num_seqs": max_num_seqs, "max_model_len": 64, "max_step_tokens": 512}
    requests = with_sampling(prompts(5, longest=30), ["greedy", "temperature"], 16)
    wanted = one_at_a_time(DFlashEngine(**(folders["llama"] | settings | {"draft": None})), requests)
    assert together(DFlashEngine(**folders["llama"], **settings), requests) == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kv_is_the_same_however_its_tokens_came_to_be_computed(
    dtype: str, folders: dict[str, dict[str, str]]
) -> None:
    settings = SETTINGS | {"dtype": dtype, "cuda_graphs": False, "kv_block_size": 4, "max_step_tokens": 256}
    assert_kv_does_not_depend_on_the_way(partial(DFlashEngine, **(folders["qwen3"] | settings)))


def test_the_embedded_model_is_exact_on_real_prompts() -> None:
    settings = SETTINGS | {"max_model_len": 360, "kv_cache_tokens": 8192}
    real = [
        turns for name, num in (("gsm8k", 8), ("mbpp", 2), ("zh_tw", 2)) for turns in conversations(name, num)
    ]
    names = ["greedy", "temperature", "everything", "top_p", "repetition", "presence", "logit_bias"]
    requests = with_sampling(real, names, 40, ignore_eos=True)
    build = partial(DFlashEngine, "smollm2-135m", **settings)
    assert_every_way_gives_the_same(build, requests, 376, "auto", thorough=False)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_greedy_tokens_in_float32_are_those_of_transformers(architecture: str, tmp_path: Any) -> None:
    folder = str(tiny_model_folder(tmp_path, architecture, dtype=torch.float32))
    engine = DFlashEngine(folder, draft=None, **(SETTINGS | {"dtype": "float32"}))
    model = loaded(folder)
    requests = with_sampling(prompts(4), ["greedy"], 24, ignore_eos=True)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        prompt = request.token_ids
        assert_same_tokens(model, prompt, result.tokens, transformers_tokens(model, prompt, 24))
