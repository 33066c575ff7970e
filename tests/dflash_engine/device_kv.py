"""KV bits of sequences that a `GpuRunner` prefilled whole, in chunks, decoded, or verified in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_engine import DFlashEngine, Request, SamplingParams
from dflash_engine.gpu_runner import GpuRunner, RoundOutput, Ticket
from dflash_engine.kv_cache import KVCache
from tests.dflash_engine.device_ops import drafts_that_are_often_right

NUM_NEW = 24


def rows_of(cache: KVCache, table: Sequence[int], length: int) -> Tensor:
    """Keys and values at positions [0, length) of one sequence: [2, layers, length, Hkv, D]."""
    at = torch.arange(length)
    size = cache.keys.shape[2]
    blocks, places = torch.tensor(table)[at // size].to(cache.keys.device), (at % size).to(cache.keys.device)
    return torch.stack([pool[:, blocks, places] for pool in (cache.keys, cache.values)]).cpu()


class KVWatch:
    """The final KV of each sequence behind its last round, and how many positions rounds made final."""

    def __init__(self, num_new: int) -> None:
        self.target: dict[int, Tensor] = {}
        self.draft: dict[int, Tensor] = {}
        self.committed: list[int] = []
        self._num_new = num_new
        self._length: dict[int, int] = {}
        self._num_given: dict[int, int] = {}

    def see(self, runner: GpuRunner, ticket: Ticket, output: RoundOutput) -> None:
        caches = runner._round._caches
        for row, out in zip(ticket.plan.rows, output.rows, strict=True):
            if self._num_given.get(row.seq_id, 0) >= self._num_new:
                continue  # it has ended, and its blocks may be another's
            start = self._length[row.seq_id] if row.ahead else row.start
            length = start + row.num_tokens + max(len(out.tokens) - 1, 0)
            # A round planned ahead may give more than the answer takes.
            length = min(length, len(row.prompt) + self._num_new - 1)
            self._length[row.seq_id] = length
            self._num_given[row.seq_id] = self._num_given.get(row.seq_id, 0) + len(out.tokens)
            self.committed.append(length - start)
            self.target[row.seq_id] = rows_of(caches.target, row.block_table, length)
            if caches.draft is not None:
                self.draft[row.seq_id] = rows_of(caches.draft, row.block_table, length)


def assert_kv_does_not_depend_on_the_way(build: Callable[..., DFlashEngine]) -> None:
    """`build` takes changes of settings; its engines have a draft and can take 128 positions."""
    noise = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(3, 300, (size,), generator=noise).tolist()) for size in (37, 5, 18)]
    collect = GpuRunner.collect

    def run(
        tokens: list[tuple[int, ...]], num_new: int, right: Any = None, **settings: Any
    ) -> tuple[list[tuple[int, ...]], KVWatch]:
        engine = build(**({"prefix_caching": False} | settings))
        watch = KVWatch(num_new)

        def spy(runner: GpuRunner, ticket: Ticket) -> RoundOutput:
            output = collect(runner, ticket)
            watch.see(runner, ticket, output)
            return output

        sampling = SamplingParams(max_tokens=num_new, ignore_eos=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GpuRunner, "collect", spy)
            if right is None:
                results = engine.generate([Request(token_ids=ids, sampling=sampling) for ids in tokens])
            else:
                with drafts_that_are_often_right(right):
                    results = engine.generate([Request(token_ids=ids, sampling=sampling) for ids in tokens])
        return [result.tokens for result in results], watch

    answers, decoded = run(prompts, NUM_NEW, draft=None)
    drafted_answers, verified = run(prompts, NUM_NEW, dict(zip(prompts, answers, strict=True)))
    assert drafted_answers == answers
    assert max(verified.committed[3:]) >= 3, "no block was accepted"
    whole = [prompt + tokens[:-1] for prompt, tokens in zip(prompts, answers, strict=True)]
    following, prefilled = run(whole, 1)
    assert following == [tokens[-1:] for tokens in answers]
    assert sorted(prefilled.committed) == sorted(len(tokens) for tokens in whole)
    _, chunked = run(whole, 1, max_step_tokens=7)
    assert max(chunked.committed) <= 7
    for index, tokens in enumerate(whole, 1):
        _, alone = run([tokens], 1, max_step_tokens=13)
        target, draft = prefilled.target[index], prefilled.draft[index]
        assert target.shape[2] == len(tokens) and not target.isnan().any() and not draft.isnan().any()
        assert torch.equal(decoded.target[index], target), "decoded"
        ways = (("chunked", chunked, index), ("verified", verified, index), ("alone", alone, 1))
        for name, other, which in ways:
            assert torch.equal(other.target[which], target), f"target, {name}"
            assert torch.equal(other.draft[which], draft), f"draft, {name}"
