"""Answers to a grammar: of it, and the same however they are run."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from dflash_engine import BadSampling, DFlashEngine, Request, SamplingParams
from dflash_engine.choose import logprob
from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.request import Message
from tests.dflash_engine.device_ops import drafts_that_are_often_right, rounds_ahead
from tests.dflash_engine.exactness import (
    SAMPLINGS,
    answer,
    assert_every_way_gives_the_same,
    guesses_that_are_often_right,
    one_at_a_time,
    together,
    with_sampling,
)
from tests.dflash_engine.late_runner import LateRunner
from tests.dflash_engine.test_core import late  # noqa: F401
from tests.dflash_engine.test_exactness import prompts
from tests.dflash_engine.test_gpu_runner import SETTINGS, finish
from tests.dflash_engine.test_gpu_runner import folders as folders_of_device  # noqa: F401
from tests.dflash_engine.test_tensor_parallel import SIZE, crews, folder_of  # noqa: F401
from tests.dflash_engine.thread_ranks import ThreadCrew
from tests.helpers import tiny_draft_folder, tiny_model_folder

END = 2
BLOCK_LENGTH = 8
REGEX = "(order|jacket|[a-f]{2,6}) [0-9]{1,3}(, (yes|no|perhaps)){1,3}!?"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "stars": {"type": "integer", "minimum": 1, "maximum": 15},
        "tags": {"type": "array", "items": {"enum": ["red", "reddish", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "stars", "tags"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {"regex": {"regex": REGEX}, "json_schema": {"json_schema": SCHEMA}}
MAX_TOKENS = 80


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("grammar")
    target = tiny_model_folder(root, "qwen3")
    return str(target), str(tiny_draft_folder(root, target))


def agrees(text: str, params: SamplingParams) -> bool:
    """Whether a whole text is of the grammar, as Python's own libraries see it."""
    if params.regex is not None:
        return re.fullmatch(params.regex, text) is not None
    value = json.loads(text)
    assert json.dumps(value, ensure_ascii=False) == text
    jsonschema.validate(value, json.loads(params.json_schema))
    return True


def check(expected: list[tuple[Any, ...]], requests: list[Request]) -> int:
    """Every whole answer agrees with its grammar; how many there are."""
    num_whole = 0
    for (tokens, text, finish_reason, *_), request in zip(expected, requests, strict=True):
        if finish_reason == "stop" and tokens[-1] == END:
            assert agrees(text, request.sampling)
            num_whole += 1
        assert END not in tokens[:-1]
    return num_whole


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_every_way_of_running_gives_the_same_answer(qwen3: tuple[str, str], kind: str, dtype: str):
    target, draft = qwen3
    build = partial(DFlashEngine, target, dtype=dtype, max_model_len=160, threads=1, kv_cache_tokens=4000)
    requests = with_sampling(prompts(len(SAMPLINGS)), list(SAMPLINGS), MAX_TOKENS, **GRAMMARS[kind])
    expected = assert_every_way_gives_the_same(build, requests, 208, draft)
    assert check(expected, requests) > len(requests) / 2
    assert len({text for _, text, *_ in expected}) > len(requests) / 2


@pytest.mark.parametrize("name", ["greedy", "top_p", "everything"])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_guesses_change_nothing_right_or_wrong_allowed_or_not(qwen3: tuple[str, str], name: str, kind: str):
    target, draft = qwen3
    build = partial(DFlashEngine, target, max_model_len=160, threads=1, kv_cache_tokens=4000)
    requests = with_sampling(prompts(8), [name], MAX_TOKENS, **GRAMMARS[kind])
    expected = one_at_a_time(build(draft=None), requests)
    answers = {request.token_ids: tokens for request, (tokens, *_) in zip(requests, expected, strict=True)}
    with guesses_that_are_often_right(answers) as made:
        engine = build(draft=draft)
        assert one_at_a_time(engine, requests) == expected
        assert together(engine, requests) == expected
    assert made
    assert engine.stats().accepted_tokens > 0.2 * engine.stats().drafted_tokens


def test_a_draft_that_knows_nothing_still_guesses_what_is_forced(qwen3: tuple[str, str]):
    target, draft = qwen3
    engine = DFlashEngine(target, draft=draft, max_model_len=160, threads=1, kv_cache_tokens=4000)
    params = SamplingParams(
        regex="Where is my order\\? The order was sent on Monday\\.", max_tokens=MAX_TOKENS
    )
    result = engine.generate(Request(token_ids=(5, 6, 7), sampling=params))
    assert result.finish_reason == "stop" and agrees(result.text, params)
    # Each step gives a whole block.
    assert result.usage.steps == -(-(len(result.tokens) - 1) // BLOCK_LENGTH) > 2


def test_max_tokens_cuts_an_answer_and_a_stop_string_ends_it(qwen3: tuple[str, str]):
    engine = DFlashEngine(qwen3[0], draft=qwen3[1], max_model_len=160, threads=1, kv_cache_tokens=4000)
    ask = partial(Request, token_ids=prompts(1)[0])
    whole = engine.generate(ask(sampling=SamplingParams(max_tokens=MAX_TOKENS, regex=REGEX)))
    for max_tokens in range(1, len(whole.tokens)):
        cut = engine.generate(ask(sampling=SamplingParams(max_tokens=max_tokens, regex=REGEX)))
        assert (cut.tokens, cut.finish_reason) == (whole.tokens[:max_tokens], "length")
        assert whole.text.startswith(cut.text)
    stopped = engine.generate(ask(sampling=SamplingParams(max_tokens=MAX_TOKENS, regex=REGEX, stop=",")))
    assert (stopped.text, stopped.finish_reason) == (whole.text.split(",")[0], "stop")


def test_log_probabilities_are_the_models_own(qwen3: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    """Before the mask: what a grammar leaves may be unlikely, and likelier tokens are named beside it."""
    engine = DFlashEngine(qwen3[0], draft=None, max_model_len=160, threads=1, kv_cache_tokens=4000)
    seen: list[bool] = []

    def spy(logits, token, num_top):
        seen.append(bool(logits.isfinite().all()))
        return logprob(logits, token, num_top)

    monkeypatch.setattr("dflash_engine.runner.logprob", spy)
    params = SamplingParams(max_tokens=MAX_TOKENS, regex=REGEX, logprobs=1)
    result = engine.generate(Request(token_ids=(5, 6, 7), sampling=params))
    assert seen == [True] * len(result.tokens)
    assert any(each.token != each.top[0][0] for each in result.logprobs)


def test_biases_and_penalties_choose_among_allowed_tokens_only(qwen3: tuple[str, str]):
    engine = DFlashEngine(qwen3[0], draft=None, max_model_len=160, threads=1, kv_cache_tokens=4000)
    params = SamplingParams(
        max_tokens=MAX_TOKENS, regex="(yes|no)", logit_bias={40: 100.0, END: 100.0}, repetition_penalty=50.0
    )
    result = engine.generate(Request(token_ids=(5, 6, 7), sampling=params))
    assert agrees(result.text, params)


def test_a_grammar_that_cannot_be_is_an_answer_to_its_request_alone(qwen3: tuple[str, str]):
    engine = DFlashEngine(qwen3[0], draft=None, max_model_len=160, threads=1, kv_cache_tokens=4000)
    bad, good = (SamplingParams(max_tokens=MAX_TOKENS, regex=text) for text in ("(a", "[ab]{3}"))
    requests = [Request(token_ids=(5, 6, 7), sampling=params) for params in (bad, good)]
    refused, answered = engine.generate(requests)
    assert isinstance(refused.error, BadSampling) and "unclosed group" in str(refused.error)
    assert answered.error is None and agrees(answered.text, good)


def mixed(max_tokens: int) -> list[Request]:
    """Requests with grammars of both kinds, sampled and not, between others without."""
    grammar = with_sampling(
        prompts(4, 20), ["greedy", "temperature"], max_tokens, regex="[a-f]{2,5} (yes|no)"
    )
    plain = with_sampling([prompt[::-1] for prompt in prompts(4, 20)], ["greedy", "top_p"], max_tokens)
    return [request for pair in zip(grammar, plain, strict=True) for request in pair]


@pytest.mark.slow
def test_on_a_device_that_goes_ahead_rows_with_grammars_hold_up_nobody(
    folders_of_device: dict[str, str],  # noqa: F811
):
    requests = mixed(14)
    plain = DFlashEngine(**(folders_of_device | SETTINGS | {"draft": None, "prefix_caching": False}))
    expected = one_at_a_time(plain, requests)
    answers = {request.token_ids: tokens for request, (tokens, *_) in zip(requests, expected, strict=True)}
    with (
        rounds_ahead() as launched,
        guesses_that_are_often_right(answers),
        drafts_that_are_often_right(answers),
    ):
        for changes in ({}, {"kv_cache_tokens": 56, "max_model_len": 48}):
            launched.clear()
            engine = DFlashEngine(**(folders_of_device | SETTINGS | changes))
            assert together(engine, requests) == expected, changes
            assert launched and not any(row.sampling.needs_host for plan in launched for row in plan.rows)


def test_rows_with_grammars_run_with_nothing_in_flight(
    qwen3: tuple[str, str],
    late: list[LateRunner],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    requests = mixed(20)
    settings = {"max_model_len": 160, "threads": 1, "kv_cache_tokens": 4000, "draft": qwen3[1]}
    core = EngineCore(EngineConfig(model=qwen3[0], **settings))
    ids = [core.add(core.prepare(request)) for request in requests]
    results = finish(core)
    assert {entry.split()[0] for entry in late[0].log} == {"launch", "collect", "execute"}
    assert core._grammars._states == {}
    monkeypatch.undo()
    expected = one_at_a_time(DFlashEngine(qwen3[0], **(settings | {"draft": None})), requests)
    assert [answer(results[seq_id]) for seq_id in ids] == expected


def test_what_was_aborted_leaves_no_state_behind(qwen3: tuple[str, str]):
    core = EngineCore(
        EngineConfig(model=qwen3[0], draft=None, max_model_len=160, threads=1, kv_cache_tokens=800)
    )
    params = SamplingParams(regex="[ab]+", max_tokens=50)
    seq_id = core.add(core.prepare(Request(token_ids=(5, 6, 7), sampling=params)))
    core.step()
    assert list(core._grammars._states) == [seq_id]
    core.abort(seq_id)
    assert core._grammars._states == {}


def test_several_ranks_give_the_same_with_the_grammars_on_the_first_alone(
    tmp_path,
    crews: list[ThreadCrew],  # noqa: F811
):
    target = folder_of(tmp_path, "qwen3")
    draft = str(tiny_draft_folder(tmp_path, target))
    settings = {"ops": "reference", "device": "cpu", "threads": 1, "tensor_parallel_size": SIZE}
    build = partial(DFlashEngine, str(target), max_model_len=64, kv_cache_tokens=1000, **settings)
    requests = with_sampling(prompts(3, longest=24), ["greedy", "temperature"], 20, regex="[a-f ]{6,9}!")
    expected = one_at_a_time(build(draft=None), requests)
    assert check(expected, requests) == len(requests)
    assert together(build(draft=draft), requests) == expected
    crews[-1].check()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_embedded_model_answers_in_json():
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        },
        "required": ["name", "age", "hobbies"],
        "additionalProperties": False,
    }
    turns = [{"role": "user", "content": f"Invent a {who}. Answer in JSON."} for who in ("cook", "pilot")]
    settings = [{"json_schema": schema, "seed": 1}, {"json_schema": schema, "temperature": 0.8, "seed": 1}]
    requests = [
        Request(messages=[Message(**turn)], sampling=SamplingParams(max_tokens=120, **each))
        for turn in turns
        for each in settings
    ]
    build = partial(DFlashEngine, "smollm2-135m", max_model_len=512, kv_cache_tokens=4096)
    expected = one_at_a_time(build(draft=None), requests)
    drafted = build()
    assert together(drafted, requests) == expected
    assert check(expected, requests) == len(requests)
    special = set(range(17)) - {END}
    assert not any(special.intersection(tokens) for tokens, *_ in expected)
    assert drafted.stats().accepted_tokens > len(requests)
