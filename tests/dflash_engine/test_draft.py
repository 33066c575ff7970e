"""What the engine drafts in each step, against the method written down plainly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_engine import DFlashEngine, Request, Result, SamplingParams
from dflash_engine.choose import guess
from dflash_engine.plan import RowPlan
from dflash_engine.runner import Runner
from tests.dflash_engine.plain_draft import PlainDraft
from tests.helpers import MASK_TOKEN_ID, assert_close, tiny_draft_folder, tiny_model_folder

TOO_CLOSE = 1e-4
"""Two best logits nearer than this may change places."""
FAVOURITES = {20: 100.0, 21: 100.0, 22: 100.0}
"""A bias to three tokens: target and draft often agree, so contexts grow by several tokens a step."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """One row of one step: what was known, and what the engine drafted behind it."""

    seq_id: int
    known: tuple[int, ...]
    start: int
    tokens: tuple[int, ...]
    logits: Tensor


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Every row that the engine drafts for from here on."""
    records: list[Drafted] = []
    logits: list[Tensor] = []
    draft_tokens = Runner._draft_tokens

    def spy_guess(row_logits: Tensor, *args: Any) -> list[int]:
        logits.append(row_logits.clone())
        return guess(row_logits, *args)

    def spy_draft_tokens(runner: Runner, rows: Sequence[RowPlan]) -> dict[int, list[int]]:
        logits.clear()
        guesses = draft_tokens(runner, rows)
        drafting = [row for row in rows if row.num_draft]
        for row, row_logits in zip(drafting, logits, strict=True):
            known = (*row.prompt, *row.output)
            assert len(known) == row.start + 1 and row.tokens == known[-1:]
            assert len(guesses[row.seq_id]) == row.num_draft
            records.append(Drafted(row.seq_id, known, row.start, tuple(guesses[row.seq_id]), row_logits))
        return guesses

    monkeypatch.setattr("dflash_engine.runner.guess", spy_guess)
    monkeypatch.setattr(Runner, "_draft_tokens", spy_draft_tokens)
    return records


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("target"), "qwen3", dtype=torch.float32)


def draft_for(target: Path, tmp_path: Path, **changes: Any) -> Path:
    return tiny_draft_folder(tmp_path, target, dtype=torch.float32, **changes)


def engine_for(target: Path, draft: Path, **settings: Any) -> DFlashEngine:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "ops": "cpu",
        "threads": 1,
        "max_model_len": 128,
        "kv_block_size": 4,
        "kv_cache_tokens": 2048,
    }
    return DFlashEngine(str(target), str(draft), **(defaults | settings))


def prompts(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, 300, (length,), generator=generator).tolist()) for length in lengths]


def generate(engine: DFlashEngine, tokens: Sequence[tuple[int, ...]], max_tokens: int = 20) -> list[Result]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logit_bias=FAVOURITES)
    requests = [Request(token_ids=ids, sampling=sampling) for ids in tokens]
    results: list[Result] = engine.generate(requests)
    assert all(len(result.tokens) == max_tokens for result in results)
    return results


def assert_as_drafted_plainly(records: Sequence[Drafted], plain: PlainDraft, block_length: int) -> None:
    """Logits are close, and tokens equal wherever the two best are not too close to tell."""
    compared = 0
    bias = torch.zeros(320)
    bias[list(FAVOURITES)] = torch.tensor(list(FAVOURITES.values()))
    for record in records:
        expected = plain.logits(record.known, block_length)[: len(record.tokens)]
        assert_close(f"draft logits at {record.start}", expected, record.logits, 1e-4)
        best = (expected + bias).topk(2)
        sure = best.values[:, 0] - best.values[:, 1] > TOO_CLOSE
        found = torch.tensor(record.tokens)
        assert torch.equal(found[sure], best.indices[sure, 0]), record
        compared += int(sure.sum())
    assert compared > 20


def grows(records: Sequence[Drafted]) -> set[int]:
    """By how many tokens contexts grew between one drafting and the next of a sequence."""
    starts: dict[int, list[int]] = {}
    for record in records:
        starts.setdefault(record.seq_id, []).append(record.start)
    return {after - before for line in starts.values() for before, after in pairwise(line)}


@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_each_step_of_a_batch_drafts_what_the_method_says(
    ops: str, target: Path, tmp_path: Path, drafted: list[Drafted]
) -> None:
    draft = draft_for(target, tmp_path)
    results = generate(engine_for(target, draft, ops=ops), prompts(1, 5, 30))
    assert {record.seq_id for record in drafted} == {1, 2, 3}
    assert 1 in grows(drafted) and max(grows(drafted)) > 1
    assert sum(result.usage.accepted_tokens for result in results) > 0
    assert_as_drafted_plainly(drafted, PlainDraft(draft, target), 8)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 10}
VARIANTS: dict[str, dict[str, Any]] = {
    "one feature": {"dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [1]}},
    "three features out of order": {
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [2, 0, 1]}
    },
    "sliding layers": SLIDING,
    "sliding layers, is_causal false": {**SLIDING, "is_causal": False},
    "sliding layers, is_causal true": {**SLIDING, "is_causal": True},
    "full layers, is_causal true": {"is_causal": True},
    "causal in dflash_config": {
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, 2], "causal": True}
    },
    "window smaller than the block": {**SLIDING, "sliding_window": 3},
    "prefixed names": {"prefix": "model."},
    "block size inside": {
        "block_size": None,
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, 2], "block_size": 6},
    },
    "attention bias": {"attention_bias": True},
    "another theta": {"rope_theta": 100.0},
    "one head of its own each": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_draft_drafts_what_the_method_says(
    changes: dict[str, Any], target: Path, tmp_path: Path, drafted: list[Drafted]
) -> None:
    draft = draft_for(target, tmp_path, **changes)
    generate(engine_for(target, draft), prompts(3, 26), max_tokens=14)
    size = changes.get("dflash_config", {}).get("block_size", 8)
    assert max(len(record.tokens) for record in drafted) == size - 1
    assert_as_drafted_plainly(drafted, PlainDraft(draft, target), size)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_features_of_other_architectures_are_theirs(
    architecture: str, tmp_path: Path, drafted: list[Drafted]
) -> None:
    folder = tiny_model_folder(tmp_path, architecture, dtype=torch.float32, tie_word_embeddings=True)
    draft = draft_for(folder, tmp_path)
    generate(engine_for(folder, draft), prompts(9, 17), max_tokens=12)
    assert_as_drafted_plainly(drafted, PlainDraft(draft, folder), 8)


def test_a_prompt_in_chunks_gives_the_same_context(
    target: Path, tmp_path: Path, drafted: list[Drafted]
) -> None:
    draft = draft_for(target, tmp_path)
    generate(engine_for(target, draft, max_step_tokens=11), prompts(40, 7, 33))
    assert_as_drafted_plainly(drafted, PlainDraft(draft, target), 8)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_preempted_sequence_gets_its_context_again(
    prefix_caching: bool, target: Path, tmp_path: Path, drafted: list[Drafted]
) -> None:
    draft = draft_for(target, tmp_path)
    engine = engine_for(target, draft, max_model_len=64, kv_cache_tokens=80, prefix_caching=prefix_caching)
    generate(engine, prompts(18, 19, 17), max_tokens=30)
    assert engine.stats().preemptions > 0
    assert_as_drafted_plainly(drafted, PlainDraft(draft, target), 8)


def test_a_cached_prefix_has_the_drafts_context_too(
    target: Path, tmp_path: Path, drafted: list[Drafted]
) -> None:
    draft = draft_for(target, tmp_path)
    engine = engine_for(target, draft)
    [first] = generate(engine, prompts(21))
    conversation = (*prompts(21)[0], *first.tokens[:14], *prompts(5, seed=1)[0])
    drafted.clear()
    [second] = generate(engine, [conversation])
    assert second.usage.cached_tokens >= 32
    assert_as_drafted_plainly(drafted, PlainDraft(draft, target), 8)


@pytest.mark.parametrize("block_length", [2, 5, 13])
def test_blocks_of_another_length_than_the_drafts_own_draft_as_that_long(
    block_length: int, target: Path, tmp_path: Path, drafted: list[Drafted]
) -> None:
    draft = draft_for(target, tmp_path)
    generate(engine_for(target, draft, block_length=block_length), prompts(4, 19), max_tokens=26)
    assert max(len(record.tokens) for record in drafted) == block_length - 1
    assert_as_drafted_plainly(drafted, PlainDraft(draft, target), block_length)


def test_a_budget_too_small_for_whole_drafts_shortens_them_and_changes_none(
    target: Path, tmp_path: Path, drafted: list[Drafted]
) -> None:
    """Steps without a draft in between still give the draft its context."""
    draft = draft_for(target, tmp_path)
    generate(engine_for(target, draft, max_step_tokens=5), prompts(4, 9, 6))
    assert {len(record.tokens) for record in drafted} & {1, 2, 3}
    assert_as_drafted_plainly(drafted, PlainDraft(draft, target), 8)
