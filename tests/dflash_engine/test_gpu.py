"""The first promise on a CUDA device, with the torch reference operations."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dflash_engine import DFlashEngine
from tests.dflash_engine.exactness import SAMPLINGS, assert_every_way_gives_the_same, with_sampling
from tests.dflash_engine.prompts import conversations
from tests.dflash_engine.test_exactness import prompts
from tests.dflash_engine.test_transformers import assert_same_tokens, loaded, transformers_tokens
from tests.helpers import tiny_draft_folder, tiny_model_folder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiny_models_are_exact_on_the_gpu(tmp_path, architecture, dtype):
    target = tiny_model_folder(tmp_path, architecture)
    draft = str(tiny_draft_folder(tmp_path, target))
    settings = {"dtype": dtype, "device": "cuda", "max_model_len": 112, "kv_cache_tokens": 2000}
    requests = with_sampling(prompts(6, longest=24), ["greedy", "everything", "top_p"], 24)
    assert_every_way_gives_the_same(partial(DFlashEngine, str(target), **settings), requests, 128, draft)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_embedded_model_is_exact_on_the_gpu(dtype):
    settings = {"dtype": dtype, "device": "cuda", "max_model_len": 400, "kv_cache_tokens": 8192}
    real = [turns for name in ("gsm8k", "mbpp", "zh_tw") for turns in conversations(name, 3)]
    requests = with_sampling(real, ["greedy", *SAMPLINGS], 20)
    assert_every_way_gives_the_same(partial(DFlashEngine, "smollm2-135m", **settings), requests, 416, "auto")


def test_greedy_tokens_on_the_gpu_are_those_of_transformers(tmp_path):
    folder = str(tiny_model_folder(tmp_path, "qwen3", dtype=torch.float32))
    engine = DFlashEngine(folder, draft=None, dtype="float32", max_model_len=256, kv_cache_tokens=2000)
    model = loaded(folder)
    requests = with_sampling(prompts(3), ["greedy"], 24, ignore_eos=True)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        prompt = request.token_ids
        assert_same_tokens(model, prompt, result.tokens, transformers_tokens(model, prompt, 24))
