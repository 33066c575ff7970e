"""The embedded model and its draft on real prompts: exact, as in transformers, and well drafted."""

from __future__ import annotations

from functools import partial

import pytest

from dflash_engine import DFlashEngine, Request, SamplingParams
from dflash_engine.catalog import resolve_model
from dflash_engine.request import Message
from dflash_engine.tokenizer import Tokenizer
from tests.dflash_engine.exactness import SAMPLINGS, assert_every_way_gives_the_same, with_sampling
from tests.dflash_engine.prompts import conversations
from tests.dflash_engine.test_transformers import assert_same_tokens, loaded, transformers_tokens

SETS = ("gsm8k", "mbpp", "mt_bench", "zh_tw")
MODEL = "smollm2-135m"


def real_prompts(each: int) -> list[list[dict[str, str]]]:
    return [turns for name in SETS for turns in conversations(name, each)]


def build_with(dtype: str) -> partial[DFlashEngine]:
    return partial(DFlashEngine, MODEL, dtype=dtype, max_model_len=512, kv_cache_tokens=8192)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_dozen_real_prompts_get_the_same_tokens_in_every_way_of_running(dtype):
    requests = with_sampling(real_prompts(3), list(SAMPLINGS), 24)
    assert_every_way_gives_the_same(build_with(dtype), requests, 560, "auto", thorough=False)


@pytest.mark.full
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("names", [["greedy"], list(SAMPLINGS)], ids=["greedy", "every-parameter"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forty_real_prompts_get_the_same_tokens_in_every_way_of_running(dtype, names):
    requests = with_sampling(real_prompts(10), names, 48)
    assert_every_way_gives_the_same(build_with(dtype), requests, 560, "auto")


def same_as_transformers(each: int, max_tokens: int) -> None:
    folder = resolve_model(MODEL)
    model, tokenizer = loaded(str(folder)), Tokenizer.load(folder)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [
        tuple(tokenizer.encode_chat([Message(**turn) for turn in turns])) for turns in real_prompts(each)
    ]
    engine = build_with("float32")(draft=None)
    results = engine.generate([Request(token_ids=prompt, sampling=params) for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        assert_same_tokens(model, prompt, result.tokens, transformers_tokens(model, prompt, max_tokens))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_embedded_model_speaks_as_in_transformers():
    same_as_transformers(each=3, max_tokens=32)


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_the_embedded_model_speaks_as_in_transformers_on_forty_prompts():
    same_as_transformers(each=10, max_tokens=48)


def acceptance_length(num_prompts: int, max_tokens: int) -> float:
    engine = build_with("bfloat16")(max_model_len=1024)
    results = engine.generate(conversations("gsm8k", num_prompts), max_tokens=max_tokens)
    usages = [result.usage for result in results]
    assert all(usage.drafted_tokens for usage in usages)
    return sum(usage.completion_tokens - 1 for usage in usages) / sum(usage.steps for usage in usages)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_draft_is_right_about_as_often_as_over_many_prompts():
    """The beginnings of 16 answers are harder than whole ones, and scatter: a wider bound."""
    assert 2.4 <= acceptance_length(16, 64) <= 3.4


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_acceptance_length_over_200_math_prompts():
    length = acceptance_length(200, 256)
    print(f"acceptance length {length:.3f}")
    assert 2.95 <= length <= 3.4
