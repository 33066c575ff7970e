"""The fake engine keeps the promises that pipeline tests build on."""

from __future__ import annotations

import asyncio

import pytest

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError, EngineDead, PromptTooLong
from dflash_engine.fake import FakeEngine
from dflash_engine.request import Message, Request, SamplingParams


def request(text: str = "hello there", **sampling) -> Request:
    return Request(messages=(Message("user", text),), sampling=SamplingParams(**sampling))


def answer(wanted: Request, **settings):
    return asyncio.run(FakeEngine(EngineConfig(model="fake", **settings)).generate(wanted))


def test_the_same_request_has_the_same_answer_with_and_without_a_draft():
    one, other = answer(request(max_tokens=20)), answer(request(max_tokens=20), draft=None)
    assert (one.text, one.tokens) == (other.text, other.tokens)
    assert one.usage.drafted_tokens > 0 == other.usage.drafted_tokens


def test_the_seed_counts_only_with_a_temperature():
    assert answer(request(seed=1)).tokens == answer(request(seed=2)).tokens
    warm = {"temperature": 1.0, "max_tokens": 50}
    assert answer(request(seed=1, **warm)).tokens != answer(request(seed=2, **warm)).tokens


def test_usage_adds_up():
    usage = answer(request(max_tokens=30, ignore_eos=True)).usage
    assert usage.completion_tokens == 30
    assert 1 + usage.steps + usage.accepted_tokens == usage.completion_tokens
    assert usage.prompt_tokens == 3


def test_a_prompt_as_long_as_the_model_is_refused_and_one_word_less_gets_one_token():
    with pytest.raises(PromptTooLong, match="4 tokens"):
        answer(request("a b c"), max_model_len=4)
    assert answer(request("a b"), max_model_len=4).usage.completion_tokens == 1


def test_chunks_join_to_the_result():
    async def chunks():
        return [chunk async for chunk in FakeEngine(EngineConfig(model="fake")).submit(request(max_tokens=9))]

    pieces = asyncio.run(chunks())
    assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
    assert [token for piece in pieces for token in piece.tokens] == list(pieces[-1].result.tokens)


def test_an_aborted_request_ends_with_what_it_has():
    async def abort_after_first():
        engine = FakeEngine(EngineConfig(model="fake"))
        wanted = Request(text="x", sampling=SamplingParams(max_tokens=50, ignore_eos=True), request_id="r")
        chunks = []
        async for chunk in engine.submit(wanted):
            chunks.append(chunk)
            engine.abort("r")
        return chunks[-1].result, engine.stats()

    result, stats = asyncio.run(abort_after_first())
    assert result.finish_reason == "abort"
    assert len(result.tokens) == 1
    assert (stats.running, stats.waiting, stats.completion_tokens) == (0, 0, 1)


def test_a_closed_engine_is_dead():
    async def use_after_close():
        engine = FakeEngine(EngineConfig(model="fake"))
        await engine.close()
        await engine.generate(request())

    with pytest.raises(EngineDead):
        asyncio.run(use_after_close())


@pytest.mark.parametrize("model", ["fake:", "fake:0.5"])
def test_names_of_the_fake_engine(model: str):
    assert (
        FakeEngine(EngineConfig(model=model)).fingerprint
        == FakeEngine(EngineConfig(model="fake")).fingerprint
    )


@pytest.mark.parametrize("model", ["fake:x", "fake:-1", "fake:nan", "other"])
def test_other_names_are_refused(model: str):
    with pytest.raises(ConfigError, match="seconds per token"):
        FakeEngine(EngineConfig(model=model))
