"""The ways of running the same requests that must not change a token, and the requests that try them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from dflash_engine import DFlashEngine, Request, Result, SamplingParams
from dflash_engine.plan import RowPlan
from dflash_engine.runner import Runner

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"temperature": 0.7, "presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {5: 4.0, 40: -100.0, 100: 2.5}},
    "stop_tokens": {"temperature": 0.6, "stop_token_ids": [33, 90, 150]},
    "stop_strings": {"temperature": 0.6, "stop": ["e", "the", "\n"]},
    "everything": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {7: 1.5},
        "logprobs": 2,
    },
}
"""One for each parameter of the sampling law; seeds are added for each request."""


def with_sampling(
    prompts: Sequence[Any], names: Sequence[str], max_tokens: int, **fields: Any
) -> list[Request]:
    """A request for each prompt, its sampling the next of `names` in turn, each with a seed of its own."""
    requests = []
    for index, prompt in enumerate(prompts):
        settings = {**SAMPLINGS[names[index % len(names)]], **fields, "max_tokens": max_tokens}
        params = SamplingParams(seed=1000 + index, **settings)
        form = {"token_ids": prompt} if isinstance(prompt[0], int) else {"messages": prompt}
        requests.append(Request(**form, sampling=params, request_id=str(index)))
    return requests


def answer(result: Result) -> tuple[Any, ...]:
    """All of a result that may not depend on how it was made."""
    assert result.error is None, result.error
    return result.tokens, result.text, result.finish_reason, result.seed, result.logprobs


def one_at_a_time(engine: DFlashEngine, requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    return [answer(engine.generate(request)) for request in requests]


def together(engine: DFlashEngine, requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    return [answer(result) for result in engine.generate(list(requests))]


def assert_every_way_gives_the_same(
    build: Callable[..., DFlashEngine],
    requests: Sequence[Request],
    small_pool: int,
    draft: str,
    *,
    thorough: bool = True,
) -> list[tuple[Any, ...]]:
    """Plain one at a time is the yardstick; `small_pool` KV tokens are too few for all requests at once."""
    expected = one_at_a_time(build(draft=None, prefix_caching=False), requests)
    drafted = build(draft=draft)
    ways = {"DFlash one at a time": one_at_a_time(drafted, requests)}
    repeated = drafted.generate(list(requests))
    assert all(result.usage.cached_tokens for result in repeated), "nothing came from the prefix cache"
    ways["DFlash in a batch, with prefix hits"] = [answer(result) for result in repeated]
    ways["DFlash in a batch"] = together(build(draft=draft, prefix_caching=False), requests)
    for caching in (False, True) if thorough else (False,):
        # Small blocks: a sequence soon grows out of what was kept free for it.
        tight = build(draft=draft, prefix_caching=caching, kv_cache_tokens=small_pool, kv_block_size=4)
        ways[f"DFlash with preemption, prefix cache {caching}"] = together(tight, requests)
        assert tight.stats().preemptions > 0, f"{small_pool} tokens were enough"
    if thorough:
        ways["DFlash with prefix hits, one at a time"] = one_at_a_time(drafted, requests)
        ways["plain in a batch"] = together(build(draft=None, prefix_caching=False), requests)
        chunked = build(draft=draft, prefix_caching=False, max_step_tokens=20)
        ways["DFlash with prompts in chunks"] = together(chunked, requests)
    for way, answers in ways.items():
        for request, got, want in zip(requests, answers, expected, strict=True):
            assert got == want, f"{way}: {request.sampling}"
    return expected


@contextmanager
def guesses_that_are_often_right(answers: dict[tuple[int, ...], tuple[int, ...]]) -> Iterator[list[int]]:
    """Drafts as a trained draft would: a random model's own are next to never accepted.

    `answers` has the right tokens by prompt; each guess is right three times in four. The list that is
    given counts how many guesses each row made.
    """
    noise = random.Random(0)
    made: list[int] = []

    def draft(_: Runner, rows: Sequence[RowPlan]) -> dict[int, list[int]]:
        guesses = {}
        for row in rows:
            if row.num_draft:
                right = answers[tuple(row.prompt)][len(row.output) :][: row.num_draft]
                right += (0,) * (row.num_draft - len(right))
                guesses[row.seq_id] = [
                    token if noise.random() < 0.75 else noise.randrange(300) for token in right
                ]
                made.append(row.num_draft)
        return guesses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_draft_tokens", draft)
        yield made
