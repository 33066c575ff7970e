"""The choice of tokens against transformers' processors, plain formulas and frequencies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import dflash_engine.choose as choose_module
from dflash_engine.choose import History, choose, guess, gumbel_noise, logprob
from dflash_engine.request import SamplingParams

CPU = torch.device("cpu")
VOCAB = 24


def some_logits(seed: int = 0, size: int = VOCAB, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def survivors(
    logits: Tensor,
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
    history: History | None = None,
) -> set[int]:
    """Tokens that can be chosen at all: with noise that would lift them above all others, they are."""
    found = set()
    for token in range(len(logits)):
        spike = torch.zeros(len(logits))
        spike[token] = 1e30
        monkeypatch.setattr(choose_module, "gumbel_noise", lambda *_, noise=spike: noise)
        if choose(logits, sampling, 0, 0, history) == token:
            found.add(token)
    monkeypatch.undo()
    return found


def processed(logits: Tensor, processors: Sequence[Any], prompt: Sequence[int] = ()) -> Tensor:
    scores, ids = logits.clone().unsqueeze(0), torch.tensor([list(prompt)], dtype=torch.int64)
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


def assert_frequencies(probabilities: Tensor, tokens: Sequence[int]) -> None:
    """Chi-square of the counts; tokens of a rare kind are counted together."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    cells = [(counts[i], expected[i]) for i in (~rare).nonzero().flatten().tolist()]
    if expected[rare].sum() > 5:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    statistic = float(sum((count - mean) ** 2 / mean for count, mean in cells))
    freedom = len(cells) - 1
    assert freedom >= 1
    # One in some ten thousand honest tests would fail; these have fixed seeds.
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4, (statistic, freedom)


PROCESSORS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "hot": ({"temperature": 1.8}, [TemperatureLogitsWarper(1.8)]),
    "top_k": ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
    "top_k of all": ({"temperature": 1.0, "top_k": VOCAB + 9}, []),
    "top_k of one": ({"temperature": 3.0, "top_k": 1}, [TopKLogitsWarper(1)]),
    "top_p": ({"temperature": 1.0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "top_p of little": ({"temperature": 1.0, "top_p": 0.01}, [TopPLogitsWarper(0.01)]),
    "min_p": ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "min_p of one": ({"temperature": 1.0, "min_p": 1.0}, [MinPLogitsWarper(1.0)]),
    "all in order": (
        {"temperature": 1.5, "min_p": 0.02, "top_k": 9, "top_p": 0.85},
        [TemperatureLogitsWarper(1.5), MinPLogitsWarper(0.02), TopKLogitsWarper(9), TopPLogitsWarper(0.85)],
    ),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("fields", "processors"), PROCESSORS.values(), ids=PROCESSORS)
def test_the_same_tokens_survive_as_in_transformers(
    fields: dict[str, Any], processors: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = some_logits(seed)
    expected = set(processed(logits, processors).isfinite().nonzero().flatten().tolist())
    assert survivors(logits, SamplingParams(**fields), monkeypatch) == expected


@pytest.mark.parametrize(("fields", "processors"), PROCESSORS.values(), ids=PROCESSORS)
def test_tokens_come_as_often_as_the_processed_distribution_says(
    fields: dict[str, Any], processors: list[Any]
) -> None:
    logits, sampling = some_logits(1), SamplingParams(**fields)
    probabilities = processed(logits, processors).softmax(-1)
    tokens = [choose(logits, sampling, 11, position, None) for position in range(3000)]
    if (probabilities > 0).sum() == 1:
        assert set(tokens) == {int(probabilities.argmax())}
    else:
        assert_frequencies(probabilities, tokens)


@pytest.mark.parametrize("seed", [0, 2**62 + 12345])
def test_over_positions_tokens_follow_the_softmax(seed: int) -> None:
    logits, sampling = some_logits(2), SamplingParams(temperature=1.0)
    tokens = [choose(logits, sampling, seed, position, None) for position in range(20_000)]
    assert_frequencies(logits.softmax(-1), tokens)
    pairs = [first * VOCAB + second for first, second in itertools.pairwise(tokens)][::2]
    assert_frequencies(torch.outer(logits.softmax(-1), logits.softmax(-1)).flatten(), pairs)


def test_over_seeds_the_tokens_of_one_position_follow_the_softmax() -> None:
    logits, sampling = some_logits(3), SamplingParams(temperature=1.0)
    tokens = [choose(logits, sampling, seed, 37, None) for seed in range(20_000)]
    assert_frequencies(logits.softmax(-1), tokens)


def test_a_choice_depends_on_nothing_but_what_it_is_given() -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, min_p=0.01, top_k=15, logit_bias={3: 1.0})
    rows = torch.stack([some_logits(seed) for seed in range(40)])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = [choose(row.clone(), sampling, 5, position, None) for position, row in enumerate(rows)]
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator was used"
    kept = rows.clone()
    shifted = torch.cat([torch.zeros(1), rows.flatten()])[1:].view(rows.shape)
    torch.manual_seed(1)
    again = [choose(shifted[position], sampling, 5, position, None) for position in reversed(range(40))]
    assert again[::-1] == first
    assert torch.equal(rows, kept), "the logits were changed"
    others = [choose(row, sampling, 6, position, None) for position, row in enumerate(rows)]
    moved = [choose(row, sampling, 5, position + 1, None) for position, row in enumerate(rows)]
    assert others != first and moved != first


def test_without_temperature_the_best_token_is_taken_and_of_equals_the_first() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert {choose(logits, SamplingParams(), seed, seed, None) for seed in range(50)} == {1}
    # Truncation keeps the best token, so it changes nothing here.
    assert choose(logits, SamplingParams(top_k=1, top_p=0.1, min_p=0.9), 0, 0, None) == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 5e-324])
def test_a_tiny_temperature_takes_the_best_token(temperature: float) -> None:
    logits = torch.tensor([1.0, 20.0, 30.0, -5.0])
    sampling = SamplingParams(temperature=temperature)
    assert [choose(logits, sampling, 1, position, None) for position in range(20)] == [2] * 20
    both = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, top_k=3)
    assert [choose(logits, both, 1, position, None) for position in range(20)] == [2] * 20


@pytest.mark.parametrize("top_p", [1e-3, 1e-11, 1e-13, 5e-324])
def test_a_tiny_top_p_takes_the_best_token(top_p: float) -> None:
    logits = torch.tensor([1.0, 20.0, 21.0, -5.0])
    sampling = SamplingParams(temperature=1.0, top_p=top_p)
    assert [choose(logits, sampling, 1, position, None) for position in range(20)] == [2] * 20


def test_of_equal_tokens_the_lower_ids_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0])
    assert survivors(logits, SamplingParams(temperature=1.0, top_k=2), monkeypatch) == {1, 2}
    assert survivors(logits[1:], SamplingParams(temperature=1.0, top_p=0.5), monkeypatch) == {0, 1}
    assert survivors(logits[1:], SamplingParams(temperature=1.0, min_p=1.0), monkeypatch) == {0, 1, 2, 3}


def test_a_bias_is_added_to_the_logits_and_can_force_or_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = some_logits(4)
    biased = logits.clone()
    biased[[2, 9]] += torch.tensor([1.5, -0.75])
    sampling = SamplingParams(temperature=1.0, logit_bias={2: 1.5, 9: -0.75})
    tokens = [choose(logits, sampling, 3, position, None) for position in range(4000)]
    assert_frequencies(biased.softmax(-1), tokens)
    assert choose(logits, SamplingParams(logit_bias={17: 100.0}), 0, 0, None) == 17
    best = int(logits.argmax())
    assert choose(logits, SamplingParams(logit_bias={best: -100.0}), 0, 0, None) == int(
        logits.topk(2).indices[1]
    )


def greedy_after(logits: Tensor, history: History, **fields: Any) -> list[int]:
    """All tokens from best to worst under the penalties: each one in turn is forbidden."""
    order: list[int] = []
    bias: dict[int, float] = {}
    for _ in range(len(logits)):
        sampling = SamplingParams(logit_bias=bias, **fields)
        order.append(choose(logits, sampling, 0, 0, history))
        bias[order[-1]] = -100.0
    return order


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_counts_prompt_and_answer_as_transformers_does(penalty: float) -> None:
    prompt, output = [1, 2, 3, 3], [4, 1]
    history = History(prompt, output, VOCAB, CPU)
    for seed in range(5):
        logits = some_logits(seed)
        expected = processed(logits, [RepetitionPenaltyLogitsProcessor(penalty)], prompt + output)
        sampling = SamplingParams(temperature=1.0, repetition_penalty=penalty)
        assert choose(logits, SamplingParams(repetition_penalty=penalty), 0, 0, history) == int(
            expected.argmax()
        )
        noisy = [int((expected + gumbel_noise(5, p, VOCAB, CPU)).argmax()) for p in range(200)]
        assert [choose(logits, sampling, 5, p, history) for p in range(200)] == noisy


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = some_logits(6, size=8, scale=0.5)
    history = History([0, 0, 0, 1], [2, 3, 3, 3], 8, CPU)
    counts = torch.tensor([0, 0, 1, 3, 0, 0, 0, 0.0])
    for presence, frequency in ((0.7, 0.0), (0.0, 0.3), (0.5, 0.25), (-0.5, -0.25)):
        expected = logits - presence * (counts > 0) - frequency * counts
        fields = {"presence_penalty": presence, "frequency_penalty": frequency}
        assert greedy_after(logits, history, **fields) == expected.argsort(descending=True).tolist()


def test_all_penalties_follow_a_bias_and_come_before_the_temperature() -> None:
    logits, prompt, output = some_logits(7), [5, 6], [6, 7, 7]
    history = History(prompt, output, VOCAB, CPU)
    sampling = SamplingParams(
        temperature=0.6,
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={6: 2.0, 9: -1.0},
    )
    scores = logits.clone()
    scores[[6, 9]] += torch.tensor([2.0, -1.0])
    scores = processed(scores, [RepetitionPenaltyLogitsProcessor(1.4)], prompt + output)
    scores[[6, 7]] -= torch.tensor([0.3 + 0.2, 0.3 + 0.4])
    expected = [int((scores / 0.6 + gumbel_noise(8, p, VOCAB, CPU)).argmax()) for p in range(300)]
    assert [choose(logits, sampling, 8, p, history) for p in range(300)] == expected


def test_a_pushed_token_counts_like_one_of_the_answer() -> None:
    pushed = History([1, 2], [3], VOCAB, CPU)
    for token in (3, 4):
        pushed.push(token)
    whole = History([1, 2], [3, 3, 4], VOCAB, CPU)
    assert torch.equal(pushed.counts, whole.counts) and torch.equal(pushed.seen, whole.seen)
    assert whole.seen.nonzero().flatten().tolist() == [1, 2, 3, 4]


def test_a_guess_is_what_the_target_would_choose_from_the_same_logits() -> None:
    rows = torch.stack([some_logits(seed) for seed in range(12)])
    for sampling in (
        SamplingParams(),
        SamplingParams(logit_bias={4: 3.0}),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, logit_bias={4: 3.0}),
    ):
        expected = [choose(row, sampling, 9, 50 + index, None) for index, row in enumerate(rows)]
        assert guess(rows, rows.argmax(-1).tolist(), sampling, 9, 50) == expected


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_log_probabilities_are_the_models_own(num_top: int) -> None:
    logits = some_logits(8, size=320, scale=4)
    expected = logits.double() - torch.logsumexp(logits.double(), 0)
    found = logprob(logits, 13, num_top)
    assert found.token == 13 and found.logprob == pytest.approx(float(expected[13]), abs=1e-5)
    best = expected.sort(descending=True)
    assert [token for token, _ in found.top] == best.indices[:num_top].tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values[:num_top].tolist(), abs=1e-5)
