"""The engine for one caller: prompts in every form, streams, usage, refusals."""

from __future__ import annotations

import pytest

from dflash_engine import (
    BadPrompt,
    BadSampling,
    ConfigError,
    DFlashEngine,
    EngineDead,
    Message,
    PromptTooLong,
    Request,
    SamplingParams,
)
from dflash_engine.runner import Runner
from tests.helpers import tiny_draft_folder, tiny_model_folder

CHAT = [{"role": "user", "content": "Where is my order?"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("engine")
    target = tiny_model_folder(root, "llama")
    return str(target), str(tiny_draft_folder(root, target))


@pytest.fixture(scope="module")
def engine(folders):
    target, draft = folders
    return DFlashEngine(target, draft=draft, max_model_len=200, kv_cache_tokens=1000, threads=1)


def test_a_text_is_one_user_turn_and_a_request_can_give_raw_text_or_tokens(engine):
    forms = ["Where is my order?", CHAT, [Message("user", "Where is my order?")], Request(messages=CHAT)]
    results = [
        engine.generate(form, max_tokens=9) if not isinstance(form, Request) else None for form in forms
    ]
    results[3] = engine.generate(Request(messages=CHAT, sampling=SamplingParams(max_tokens=9)))
    assert len({result.tokens for result in results}) == 1
    raw = engine.generate(Request(text="Where is my order?", sampling=SamplingParams(max_tokens=9)))
    assert raw.usage.prompt_tokens < results[0].usage.prompt_tokens


def test_a_list_is_answered_in_its_order_and_a_bad_prompt_in_it_costs_nobody_else(engine):
    good = [engine.generate(text, max_tokens=8).tokens for text in ("One", "Two")]
    results = engine.generate(["One", "", "Two", "x" * 5000], max_tokens=8)
    assert [results[0].tokens, results[2].tokens] == good
    assert isinstance(results[1].error, BadPrompt) and isinstance(results[3].error, PromptTooLong)
    assert "200" in str(results[3].error)
    assert engine.generate([]) == []


def test_a_single_bad_request_raises_what_is_wrong_with_it(engine):
    with pytest.raises(PromptTooLong, match="tokens"):
        engine.generate("x" * 5000)
    with pytest.raises(BadPrompt, match="empty"):
        engine.generate("")
    with pytest.raises(BadPrompt, match="narrator"):
        engine.generate([{"role": "narrator", "content": "x"}])
    with pytest.raises(BadPrompt, match="319"):
        engine.generate(Request(token_ids=(1, 320)))
    with pytest.raises(BadSampling, match="temperature"):
        engine.generate("x", temperature=-1)
    with pytest.raises(BadSampling, match="token 400"):
        engine.generate("x", logit_bias={400: 1.0})
    with pytest.raises(BadSampling, match="max_token"):
        engine.generate("x", max_token=3)


def test_the_pieces_of_a_stream_are_the_text_and_tokens_of_the_result(engine):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True)
    chunks = list(engine.stream("Tell me", params))
    result = chunks[-1].result
    assert result is not None and all(chunk.result is None for chunk in chunks[:-1])
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(token for chunk in chunks for token in chunk.tokens) == result.tokens
    assert (
        result == engine.generate("Tell me", params)
        or result.tokens == engine.generate("Tell me", params).tokens
    )
    assert len(chunks) > 5


def test_the_first_piece_says_what_came_from_the_cache_and_each_has_its_log_probabilities(engine):
    prompt = "The same beginning of every prompt, which is longer than a block of the cache."
    engine.generate(prompt, max_tokens=5)
    chunks = list(engine.stream(prompt, max_tokens=12, ignore_eos=True, logprobs=2))
    result = chunks[-1].result
    assert {chunk.cached_tokens for chunk in chunks} == {result.usage.cached_tokens} != {0}
    assert all([each.token for each in chunk.logprobs] == list(chunk.tokens) for chunk in chunks)
    assert sum((chunk.logprobs for chunk in chunks), ()) == result.logprobs


def test_requests_of_different_salts_share_no_cached_prompt_and_have_the_same_answer(engine):
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    prompt = tuple(range(20, 60))
    results = [
        engine.generate(Request(token_ids=prompt, sampling=params, cache_salt=salt))
        for salt in ("one", "two", "one", "", "two")
    ]
    assert len({result.tokens for result in results}) == 1
    assert [result.usage.cached_tokens > 0 for result in results] == [False, False, True, False, True]


def test_a_stream_that_is_left_early_gives_its_blocks_back(folders):
    target, draft = folders
    engine = DFlashEngine(target, draft=draft, max_model_len=100, kv_cache_tokens=112, threads=1)
    for _ in range(5):  # the pool holds one sequence: a leak would stop the second
        for _ in engine.stream("Tell me", max_tokens=80, ignore_eos=True):
            break
    assert len(engine.generate("Tell me", max_tokens=20, ignore_eos=True).tokens) == 20


def test_half_characters_are_never_shown(engine):
    """Biased to bytes of Chinese characters and emoji, the tiny model says them byte by byte."""
    tokens = engine._core._tokenizer.encode("您的订单🙂👩‍👩‍👧已经发货🚚。")
    for size in (1, 2, 3, 7):
        stream, shown = engine._core._tokenizer.stream(), ""
        for first in range(0, len(tokens), size):
            piece = "".join(stream.push(token) for token in tokens[first : first + size])
            assert "�" not in piece
            shown += piece
        assert shown + stream.flush() == "您的订单🙂👩‍👩‍👧已经发货🚚。"


def test_usage_adds_up(engine):
    before = engine.stats()
    results = engine.generate(["One", "Two", "Three", "Three"], max_tokens=30, ignore_eos=True)
    usages = [result.usage for result in results]
    after = engine.stats()
    assert sum(usage.busy_ns for usage in usages) == after.busy_ns - before.busy_ns
    assert sum(usage.completion_tokens for usage in usages) == 4 * 30
    assert after.completion_tokens - before.completion_tokens == 4 * 30
    for usage in usages:
        assert usage.steps + usage.accepted_tokens >= usage.completion_tokens - 1 >= usage.steps
        assert usage.accepted_tokens <= usage.drafted_tokens <= 7 * usage.steps
        assert usage.prompt_tokens > usage.cached_tokens >= 0
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    assert after.prompt_tokens - before.prompt_tokens == computed


def test_plain_decoding_drafts_nothing_and_commits_one_token_a_step(folders):
    target, _ = folders
    engine = DFlashEngine(target, draft=None, max_model_len=200, kv_cache_tokens=1000, threads=1)
    usage = engine.generate("One", max_tokens=20, ignore_eos=True).usage
    assert (usage.drafted_tokens, usage.steps, usage.acceptance_length) == (0, 19, 1.0)


def test_stop_strings_and_tokens_end_an_answer_where_they_stand(engine):
    whole = engine.generate("One", max_tokens=40, temperature=1.0, seed=2, ignore_eos=True)
    middle = whole.text[len(whole.text) // 2 :][:3]
    cut = engine.generate("One", max_tokens=40, temperature=1.0, seed=2, ignore_eos=True, stop=middle)
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(middle)], "stop")
    assert (whole.matched_stop, cut.matched_stop) == (None, middle)
    token = whole.tokens[10]
    ended = engine.generate(
        "One", max_tokens=40, temperature=1.0, seed=2, ignore_eos=True, stop_token_ids=[token]
    )
    assert ended.tokens == whole.tokens[: whole.tokens.index(token) + 1] and ended.finish_reason == "stop"
    assert ended.matched_stop == token


def test_a_failed_step_kills_the_engine_with_its_reason(folders, monkeypatch):
    target, draft = folders
    engine = DFlashEngine(target, draft=draft, max_model_len=100, kv_cache_tokens=200, threads=1)

    def fail(*_):
        raise RuntimeError("the device fell off")

    monkeypatch.setattr(Runner, "execute", fail)
    with pytest.raises(EngineDead, match="the device fell off"):
        engine.generate("One")
    monkeypatch.undo()
    with pytest.raises(EngineDead, match="the device fell off"):
        engine.generate("One")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtypo": "float32"}, "dtypo"),
        ({"dtype": "int4"}, "dtype"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"max_model_len": 100000}, "100000"),
        ({"kv_cache_tokens": 64}, "64"),
        ({"draft": None, "block_length": 4}, "needs a draft"),
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"draft": "no/such/draft"}, "no/such/draft"),
    ],
)
def test_settings_that_cannot_work_are_one_clear_sentence(folders, settings, message):
    target, draft = folders
    arguments = {"model": target, "draft": draft, "max_model_len": 100, **settings}
    with pytest.raises(ConfigError, match=message) as error:
        DFlashEngine(**arguments)
    assert "\n" not in str(error.value)
