"""The KV of a sequence is the same to the bit however its tokens came to be computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_engine import DFlashEngine, Request, SamplingParams
from dflash_engine.kv_cache import KVCache
from dflash_engine.plan import StepOutput, StepPlan
from dflash_engine.runner import Runner
from tests.helpers import tiny_draft_folder, tiny_model_folder

BLOCK = 4
NUM_NEW = 24
FAVOURITES = {20: 100.0, 21: 100.0, 22: 100.0}
"""A bias that lets target and draft agree often, so that verified blocks are long."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def rows_of(cache: KVCache, table: Sequence[int], length: int) -> Tensor:
    """Keys and values at positions [0, length) of one sequence: [2, layers, length, Hkv, D]."""
    at = torch.arange(length)
    blocks = torch.tensor(table)[at // BLOCK]
    return torch.stack([pool[:, blocks, at % BLOCK] for pool in (cache.keys, cache.values)])


class KVWatch:
    """The committed KV of each sequence after its last step, and how its steps were made up."""

    def __init__(self) -> None:
        self.target: dict[int, Tensor] = {}
        self.draft: dict[int, Tensor] = {}
        self.fed: list[int] = []
        self.committed: list[int] = []

    def see(self, runner: Runner, plan: StepPlan, output: StepOutput) -> None:
        for row, out in zip(plan.rows, output.rows, strict=True):
            num = len(row.tokens) + max(len(out.tokens) - 1, 0)
            length = row.start + num
            self.target[row.seq_id] = rows_of(runner._cache, row.block_table, length)
            if runner._draft_cache is not None:
                self.draft[row.seq_id] = rows_of(runner._draft_cache, row.block_table, length)
            self.fed.append(len(row.tokens))
            self.committed.append(num)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> KVWatch:
    watch, execute = KVWatch(), Runner.execute

    def spy(runner: Runner, plan: StepPlan) -> StepOutput:
        output = execute(runner, plan)
        watch.see(runner, plan, output)
        return output

    monkeypatch.setattr(Runner, "execute", spy)
    return watch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    made = {}
    for architecture in ("llama", "qwen3"):
        target = tiny_model_folder(tmp_path_factory.mktemp(architecture), architecture)
        made[architecture] = target, tiny_draft_folder(target.parent, target)
    return made


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefilled_chunked_decoded_and_verified_tokens_have_the_same_kv(
    architecture: str, ops: str, dtype: str, folders: dict[str, tuple[Path, Path]], watch: KVWatch
) -> None:
    target, draft = folders[architecture]
    noise = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(3, 300, (size,), generator=noise).tolist()) for size in (37, 5, 18)]

    def run(
        tokens: list[tuple[int, ...]], num_new: int, **settings: Any
    ) -> tuple[list[tuple[int, ...]], KVWatch]:
        watch.__init__()  # type: ignore[misc]
        fixed: dict[str, Any] = {
            "model": str(target),
            "draft": str(draft),
            "ops": ops,
            "dtype": dtype,
            "device": "cpu",
            "threads": 2,
            "kv_block_size": BLOCK,
            "kv_cache_tokens": 2048,
            "max_model_len": 128,
        }
        engine = DFlashEngine(**(fixed | settings))
        sampling = SamplingParams(max_tokens=num_new, ignore_eos=True, logit_bias=FAVOURITES)
        results = engine.generate([Request(token_ids=ids, sampling=sampling) for ids in tokens])
        return [result.tokens for result in results], watch

    def kept(seq_id: int) -> tuple[Tensor, Tensor]:
        return watch.target[seq_id], watch.draft[seq_id]

    answers, _ = run(prompts, NUM_NEW)
    verified = [kept(seq_id) for seq_id in (1, 2, 3)]
    assert max(watch.committed[3:]) >= 4, "no block was accepted"

    plain_answers, _ = run(prompts, NUM_NEW, draft="none")
    assert plain_answers == answers
    decoded = [watch.target[seq_id] for seq_id in (1, 2, 3)]

    whole = [prompt + answer[:-1] for prompt, answer in zip(prompts, answers, strict=True)]
    following, _ = run(whole, 1)
    assert following == [answer[-1:] for answer in answers]
    assert watch.fed == [len(tokens) for tokens in whole]
    prefilled = [kept(seq_id) for seq_id in (1, 2, 3)]

    run(whole, 1, max_step_tokens=7)
    assert max(watch.fed) <= 7
    chunked = [kept(seq_id) for seq_id in (1, 2, 3)]

    alone = []
    for tokens in whole:
        run([tokens], 1, max_step_tokens=13, threads=1)
        alone.append(kept(1))

    for index, tokens in enumerate(whole):
        expected_target, expected_draft = prefilled[index]
        assert expected_target.shape[2] == len(tokens)
        assert not expected_target.isnan().any() and not expected_draft.isnan().any()
        assert torch.equal(decoded[index], expected_target), "decoded"
        for name, way in (("chunked", chunked), ("verified", verified), ("alone", alone)):
            assert torch.equal(way[index][0], expected_target), f"target, {name}"
            assert torch.equal(way[index][1], expected_draft), f"draft, {name}"
