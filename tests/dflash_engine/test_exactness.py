"""The same request gives the same tokens, however it is run: DESIGN's first promise."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from dflash_engine import DFlashEngine, Request, SamplingParams
from tests.dflash_engine.exactness import (
    SAMPLINGS,
    assert_every_way_gives_the_same,
    guesses_that_are_often_right,
    one_at_a_time,
    together,
    with_sampling,
)
from tests.helpers import tiny_draft_folder, tiny_model_folder

MAX_TOKENS = 28
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope-tied": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def folders(request, tmp_path_factory):
    architecture, overrides = MODELS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    target = tiny_model_folder(root, architecture, **overrides)
    return str(target), str(tiny_draft_folder(root, target))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen3")
    target = tiny_model_folder(root, "qwen3")
    return str(target), str(tiny_draft_folder(root, target))


def prompts(num: int, longest: int = 70) -> list[tuple[int, ...]]:
    """Random token ids, each more than a block, some with a common beginning of half their length."""
    noise = random.Random(7)
    shared = tuple(noise.randrange(3, 300) for _ in range(longest // 2))
    lengths = [noise.randrange(17, longest) for _ in range(num)]
    return [
        ((shared if index % 3 == 0 else ()) + tuple(noise.randrange(3, 300) for _ in range(length)))[:length]
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_way_of_running_gives_the_tokens_of_plain_decoding_one_at_a_time(folders, dtype):
    target, draft = folders
    build = partial(DFlashEngine, target, dtype=dtype, max_model_len=160, threads=1, kv_cache_tokens=4000)
    requests = with_sampling(prompts(len(SAMPLINGS)), list(SAMPLINGS), MAX_TOKENS)
    expected = assert_every_way_gives_the_same(build, requests, 224, draft)
    assert len({tokens for tokens, *_ in expected}) == len(requests)
    assert sum(len(tokens) for tokens, *_ in expected) > 8 * len(requests)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plain_torch_operations_are_exact_too(qwen3, dtype):
    target, draft = qwen3
    settings = {
        "dtype": dtype,
        "ops": "reference",
        "max_model_len": 112,
        "threads": 1,
        "kv_cache_tokens": 2000,
    }
    build = partial(DFlashEngine, target, **settings)
    requests = with_sampling(prompts(6, longest=24), ["greedy", "everything"], 24)
    assert_every_way_gives_the_same(build, requests, 128, draft)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_accepted_prefixes_change_nothing_for_any_sampling_parameter(qwen3, name, dtype):
    """Guesses that are right three times in four take every length of accepted prefix."""
    target, draft = qwen3
    build = partial(DFlashEngine, target, dtype=dtype, max_model_len=160, threads=1, kv_cache_tokens=4000)
    requests = with_sampling(prompts(10), [name], MAX_TOKENS)
    expected = one_at_a_time(build(draft=None), requests)
    answers = {request.token_ids: tokens for request, (tokens, *_) in zip(requests, expected, strict=True)}
    with guesses_that_are_often_right(answers) as made:
        engine = build(draft=draft)
        assert one_at_a_time(engine, requests) == expected
        assert together(engine, requests) == expected
        tight = build(draft=draft, kv_cache_tokens=176, kv_block_size=4)
        assert together(tight, requests) == expected
    assert made
    if "stop" not in name:
        stats = engine.stats()
        assert tight.stats().preemptions > 0
        assert stats.accepted_tokens > 0.2 * stats.drafted_tokens


@pytest.mark.parametrize("block_length", [1, 2, 5, 16])
def test_the_block_length_changes_nothing(qwen3, block_length):
    target, draft = qwen3
    requests = with_sampling(prompts(6), ["greedy", "everything"], MAX_TOKENS)
    build = partial(DFlashEngine, target, max_model_len=160, threads=1, kv_cache_tokens=4000)
    expected = one_at_a_time(build(draft=None), requests)
    assert together(build(draft=draft, block_length=block_length), requests) == expected


def test_answers_end_at_the_models_length_and_at_max_tokens_with_and_without_a_draft(qwen3):
    target, draft = qwen3
    build = partial(DFlashEngine, target, max_model_len=64, threads=1, kv_cache_tokens=400)
    prompt = prompts(1)[0][:50]
    for max_tokens, length in ((1, 1), (2, 2), (9, 9), (13, 13), (14, 14), (100, 14)):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        plain, drafted = (
            build(draft=which).generate(Request(token_ids=prompt, sampling=params)) for which in (None, draft)
        )
        assert plain.tokens == drafted.tokens
        assert (len(drafted.tokens), drafted.finish_reason) == (length, "length")


def test_a_genuine_token_equal_to_the_mask_id_is_text(qwen3):
    """A biased model that says the mask token over and over is not stripped by value."""
    target, draft = qwen3
    mask = 304
    build = partial(DFlashEngine, target, max_model_len=160, threads=1, kv_cache_tokens=400)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias={mask: 100.0})
    results = [
        build(draft=which).generate(Request(token_ids=(5, 6, 7), sampling=params)) for which in (None, draft)
    ]
    assert results[0].tokens == results[1].tokens == (mask,) * 12


def test_a_request_without_a_seed_gets_one_that_repeats_it(qwen3):
    target, draft = qwen3
    engine = DFlashEngine(target, draft=draft, max_model_len=160, threads=1, kv_cache_tokens=400)
    prompt = prompts(1)[0]
    unseeded = Request(token_ids=prompt, sampling=SamplingParams(temperature=1.0, max_tokens=20))
    first, other = engine.generate(unseeded), engine.generate(unseeded)
    assert first.seed != other.seed and first.tokens != other.tokens
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=first.seed)
    assert engine.generate(Request(token_ids=prompt, sampling=params)).tokens == first.tokens
