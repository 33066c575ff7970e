"""Answers of rounds on a device that goes ahead are those of an engine that waits for each round."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from dflash_engine import DFlashEngine, Request, SamplingParams, loading
from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.errors import BadSampling
from dflash_engine.ops import MAX_BIAS
from dflash_engine.plan import StepPlan
from dflash_engine.request import Result
from dflash_engine.scheduler import Scheduler
from tests.dflash_engine.device_kv import assert_kv_does_not_depend_on_the_way
from tests.dflash_engine.device_ops import drafts_that_are_often_right, rounds_ahead
from tests.dflash_engine.exactness import SAMPLINGS, answer, one_at_a_time, together, with_sampling
from tests.dflash_engine.fake_texts import MoodyPolicy
from tests.helpers import tiny_draft_folder, tiny_model_folder

TINY = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
TINY_DRAFT = {
    "num_hidden_layers": 1,
    "dflash_config": {"mask_token_id": 304, "target_layer_ids": [0, 1]},
    "block_size": 4,
}
SETTINGS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "max_model_len": 64, "kv_cache_tokens": 800, "kv_block_size": 4,
    "max_num_seqs": 5, "max_step_tokens": 48,
}  # fmt: skip
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("device")
    target = tiny_model_folder(root, "llama", **TINY)
    return {"model": str(target), "draft": str(tiny_draft_folder(root, target, **TINY_DRAFT))}


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Target and draft with a layer that sees all and one that sees a few tokens."""
    root = tmp_path_factory.mktemp("windows")
    sliding = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    target = tiny_model_folder(root, "qwen2", **(TINY | sliding))
    layers = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    draft = tiny_draft_folder(root, target, **(TINY_DRAFT | layers | sliding))
    return {"model": str(target), "draft": str(draft)}


@pytest.fixture
def launched() -> Iterator[list[StepPlan]]:
    with rounds_ahead() as plans:
        yield plans


def prompts(num: int, longest: int = 30) -> list[tuple[int, ...]]:
    """Each another one, some with a beginning of the same tokens."""
    noise = random.Random(num)
    shared = tuple(noise.randrange(3, 300) for _ in range(longest // 2))
    lengths = [noise.choice([1, 4, 5, 9, 17, longest]) for _ in range(num)]
    return [
        ((shared if index % 3 == 0 else ()) + tuple(noise.randrange(3, 300) for _ in range(length)))[-length:]
        for index, length in enumerate(lengths)
    ]


def expected(folders: dict[str, str], requests: list[Request], **changes: Any) -> list[tuple[Any, ...]]:
    """Plain decoding, one request at a time, each round waited for."""
    engine = DFlashEngine(**(folders | SETTINGS | {"draft": None, "prefix_caching": False} | changes))
    assert type(engine._core._pipeline._runner).__name__ == "Runner"
    return one_at_a_time(engine, requests)


def right_answers(requests: list[Request], wanted: list[tuple[Any, ...]]) -> dict[Any, Any]:
    return {request.token_ids: tokens for request, (tokens, *_) in zip(requests, wanted, strict=True)}


def finish(core: EngineCore) -> dict[int, Result]:
    results = {}
    while core.has_work:
        for seq_id, chunk in core.step():
            if chunk.result is not None:
                results[seq_id] = chunk.result
    return results


WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preempting": {"kv_cache_tokens": 56, "max_model_len": 48},
    "small steps": {"max_step_tokens": 11, "max_num_seqs": 3},
    "one token a step": {"max_step_tokens": 1, "max_num_seqs": 2},
    "blocks of 2": {"block_length": 2},
    "one sequence at a time, in blocks of 7": {"block_length": 7, "max_num_seqs": 1},
    "plain": {"draft": None},
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_plain_decoding_for_every_sampling_parameter(
    way: str, folders: dict[str, str]
) -> None:
    settings = folders | SETTINGS | WAYS[way]
    few = ["greedy", "temperature", "everything"]
    names = few if way.startswith("one") else list(SAMPLINGS)
    requests = with_sampling(prompts(len(names)), names, MAX_TOKENS)
    wanted = expected(folders, requests)
    with rounds_ahead() as launched, drafts_that_are_often_right(right_answers(requests, wanted)) as made:
        engine = DFlashEngine(**settings)
        assert together(engine, requests) == wanted
    stats = engine.stats()
    assert (stats.preemptions > 0) == (way == "preempting")
    assert len(launched) > MAX_TOKENS / 2
    if way not in ("plain", "one token a step"):
        assert stats.accepted_tokens > 0.1 * stats.drafted_tokens > 0
        assert len(set(made)) > 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_windows_of_target_and_draft_are_those_of_rounds_that_are_waited_for(
    windows: dict[str, str], dtype: str
) -> None:
    """The draft model's own guesses: were what it sees another, so were what it has right. Much noise, which
    target and draft share, makes that a lot."""
    settings = windows | SETTINGS | {"dtype": dtype, "prefix_caching": False}
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=heat, seed=seed)
        for seed, heat in enumerate([0.0, 0.9, 6.0, 6.0])
    ]
    requests = [Request(token_ids=ids, sampling=each) for ids, each in zip(prompts(4), params, strict=True)]
    wanted = expected(windows, requests, dtype=dtype)
    waited = [DFlashEngine(**settings).generate(request) for request in requests]
    with rounds_ahead():
        ahead = DFlashEngine(**settings)
    results = [ahead.generate(request) for request in requests]
    assert [answer(result) for result in waited] == [answer(result) for result in results] == wanted
    accepted = [[result.usage.accepted_tokens for result in each] for each in (waited, results)]
    assert accepted[0] == accepted[1] and max(accepted[0]) > 3
    assert together(ahead, requests) == wanted


def test_prefix_hits_change_nothing_also_where_one_prompt_token_is_left(folders: dict[str, str]) -> None:
    texts = [tuple(range(10, 10 + length)) for length in (9, 13, 5, 20, 8)]
    requests = with_sampling(texts, ["greedy", "temperature", "everything", "presence"], MAX_TOKENS)
    wanted = expected(folders, requests)
    with rounds_ahead() as launched, drafts_that_are_often_right(right_answers(requests, wanted)):
        engine = DFlashEngine(**folders, **SETTINGS)
        assert together(engine, requests) == wanted
        begun = len(launched)
        results = engine.generate(requests)
    assert [answer(result) for result in results] == wanted
    assert [result.usage.cached_tokens for result in results] == [8, 12, 4, 16, 4]
    firsts = [row for plan in launched[begun:] for row in plan.rows if not row.ahead and row.start == 8]
    assert any(len(row.tokens) == 1 for row in firsts)


def test_a_sequence_that_resumes_with_its_anchor_alone_drafts_at_once(folders: dict[str, str]) -> None:
    names = ["greedy", "temperature", "repetition", "frequency"]
    requests = with_sampling(prompts(5), names, 20, ignore_eos=True)
    wanted = expected(folders, requests)
    tight = folders | SETTINGS | {"kv_block_size": 1, "kv_cache_tokens": 90}
    with rounds_ahead() as launched, drafts_that_are_often_right(right_answers(requests, wanted)):
        engine = DFlashEngine(**tight)
        assert together(engine, requests) == wanted
    assert engine.stats().preemptions > 0
    resumed = [row for plan in launched for row in plan.rows if row.num_draft and not row.ahead]
    assert resumed and all(len(row.tokens) == 1 for row in resumed)


def test_penalties_know_what_was_answered_before_a_preemption(folders: dict[str, str]) -> None:
    """Three tokens that take turns, since each is the less likely the more often it was said."""
    taking_turns = {"logit_bias": {20: 100.0, 21: 100.0, 22: 100.0}, "ignore_eos": True, "max_tokens": 24}
    penalties = [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0, "repetition_penalty": 1.2}]
    params = [SamplingParams(seed=index, **taking_turns, **penalties[index % 2]) for index in range(4)]
    texts = [(20, 5, 6, index + 7) for index in range(4)]
    requests = [Request(token_ids=ids, sampling=each) for ids, each in zip(texts, params, strict=True)]
    wanted = expected(folders, requests)
    tight = {"kv_cache_tokens": 60, "max_model_len": 40, "prefix_caching": False}
    with rounds_ahead(), drafts_that_are_often_right(right_answers(requests, wanted)):
        engine = DFlashEngine(**(folders | SETTINGS | tight))
        assert together(engine, requests) == wanted
    assert engine.stats().preemptions > 0 and engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("seed", range(2))
def test_a_policy_that_changes_its_mind_changes_no_answer(
    seed: int, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = with_sampling(prompts(6), ["greedy", "temperature", "presence"], 30, ignore_eos=True)
    wanted = expected(folders, requests)
    policy = MoodyPolicy(random.Random(seed))
    build = lambda **given: Scheduler(**{**given, "draft_policy": policy})  # noqa: E731
    monkeypatch.setattr(loading, "Scheduler", build)
    with rounds_ahead() as launched, drafts_that_are_often_right(right_answers(requests, wanted)):
        engine = DFlashEngine(**folders, **SETTINGS)
        assert together(engine, requests) == wanted
    assert any(row.rebuild for plan in launched for row in plan.rows)
    assert {plan.write_context for plan in launched} == {False, True}
    assert engine.stats().accepted_tokens > 0


def test_a_request_aborted_in_flight_leaves_its_slot_clean_for_the_next(
    folders: dict[str, str], launched: list[StepPlan]
) -> None:
    names = ["everything", "temperature", "frequency", "greedy", "logit_bias", "repetition"]
    requests = with_sampling(prompts(6), names, 16, ignore_eos=True, logprobs=None)
    settings = folders | SETTINGS | {"max_num_seqs": 2}
    alone = [DFlashEngine(**settings).generate(request).tokens for request in requests[2:]]
    core = EngineCore(EngineConfig(**settings))
    ids = [core.add(core.prepare(request)) for request in requests]
    core.step()
    core.step()
    assert core.abort(ids[0]) is not None
    core.step()
    assert core.abort(ids[1]) is not None
    results = finish(core)
    assert [results[seq_id].tokens for seq_id in ids[2:]] == alone
    assert {row.slot for plan in launched for row in plan.rows} == {0, 1}


@pytest.mark.parametrize(
    ("max_tokens", "length"), [(1, 1), (2, 2), (3, 3), (9, 9), (13, 13), (14, 14), (99, 14)]
)
def test_answers_end_at_the_models_length_and_at_max_tokens(
    max_tokens: int, length: int, folders: dict[str, str]
) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    request = Request(token_ids=tuple(range(20, 38)), sampling=params)
    wanted = expected(folders, [request], max_model_len=32)
    everything = Request(token_ids=request.token_ids, sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    right = right_answers([request], expected(folders, [everything]))
    with rounds_ahead(), drafts_that_are_often_right(right, rate=1.0):
        # A pool that holds one sequence of the longest kind and not a block more.
        tight = {"max_model_len": 32, "kv_cache_tokens": 40}
        engine = DFlashEngine(**(folders | SETTINGS | tight))
        result = engine.generate(request)
    assert answer(result) == wanted[0]
    assert (len(result.tokens), result.finish_reason) == (length, "length")


def test_kv_is_the_same_however_its_tokens_came_to_be_computed(folders: dict[str, str]) -> None:
    with rounds_ahead():
        settings = SETTINGS | {"max_model_len": 128, "kv_cache_tokens": 1000, "max_step_tokens": 200}
        assert_kv_does_not_depend_on_the_way(partial(DFlashEngine, **(folders | settings)))


def test_more_biases_than_a_slot_holds_are_refused(tmp_path: Any) -> None:
    target = tiny_model_folder(tmp_path, "llama", **TINY, vocab_size=MAX_BIAS + 100)
    core = EngineCore(EngineConfig(**(SETTINGS | {"model": str(target), "draft": None})))
    for num in (MAX_BIAS, MAX_BIAS + 1):
        sampling = SamplingParams(logit_bias=dict.fromkeys(range(num), 1.0), max_tokens=2)
        request = Request(token_ids=(5, 6), sampling=sampling)
        if num > MAX_BIAS:
            with pytest.raises(BadSampling, match=f"logit_bias has {num} tokens"):
                core.prepare(request)
        else:
            core.add(core.prepare(request))
    assert len(finish(core)) == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows of padding that are NaN
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_with_the_gpu_kernels_answers_are_the_same_alone_and_in_a_batch(
    architecture: str, tmp_path: Any
) -> None:
    """All of a GPU's kernels, in the interpreter; rows of padding are poison there, also to the experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shape = TINY | {"num_hidden_layers": 1} | (experts if architecture == "qwen3_moe" else {})
    target = tiny_model_folder(tmp_path, architecture, **shape)
    draft_shape = TINY_DRAFT | {"dflash_config": {"mask_token_id": 304, "target_layer_ids": [0]}}
    folders = {"model": str(target), "draft": str(tiny_draft_folder(tmp_path, target, **draft_shape))}
    settings = SETTINGS | {"ops": "triton", "prefix_caching": False, "max_step_tokens": 12}
    requests = with_sampling(prompts(3, longest=9), ["greedy", "temperature", "top_k"], 4, ignore_eos=True)
    plain = DFlashEngine(**(folders | settings | {"draft": None}))
    wanted = [answer(plain.generate(request)) for request in requests[:2]]
    with drafts_that_are_often_right(right_answers(requests[:2], wanted)):
        engine = DFlashEngine(**folders, **settings)
        assert together(engine, requests)[:2] == wanted
    assert engine.stats().accepted_tokens > 0
