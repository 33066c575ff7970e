"""Engines with random weights: real shapes, token ids only, and acceptance that is made up on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_engine import (
    BadPrompt,
    ConfigError,
    DFlashEngine,
    EngineConfig,
    Message,
    Request,
    SamplingParams,
)
from dflash_engine.random_weights import RandomCheckpoint, SimulatedAcceptance, acceptance_rate
from tests.dflash_engine.tiny_shapes import write_shapes

CPU = torch.device("cpu")


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    return str(write_shapes(tmp_path))


def engine(shapes: str, **settings: Any) -> DFlashEngine:
    return DFlashEngine(shapes, weights="random", **{"device": "cpu", "dtype": "float32"} | settings)


def requests(num: int, max_tokens: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Request(token_ids=(3, 1, 4, number), sampling=sampling) for number in range(num)]


def test_tensors_have_the_shape_asked_for_norms_around_one_and_the_rest_around_zero():
    checkpoint = RandomCheckpoint(CPU, torch.bfloat16, 0)
    matrix = checkpoint.take("model.layers.0.mlp.up_proj.weight", (300, 200))
    norm = checkpoint.take("model.layers.0.input_layernorm.weight", (5000,))
    experts = checkpoint.take("model.layers.0.mlp.experts.gate_up_proj", (3, 4, 5))
    assert (matrix.shape, norm.shape, experts.shape) == ((300, 200), (5000,), (3, 4, 5))
    assert matrix.dtype == norm.dtype == torch.bfloat16
    assert float(matrix.float().mean()) == pytest.approx(0, abs=1e-3)
    assert float(matrix.float().std()) == pytest.approx(0.02, rel=0.05)
    assert float(norm.float().mean()) == pytest.approx(1, abs=2e-3)
    checkpoint.finish()


def test_the_seed_decides_the_tensors():
    first, again, other = (RandomCheckpoint(CPU, torch.float32, seed).take("w", (4, 4)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_answers_are_tokens_without_text_and_the_draft_does_not_change_them(shapes):
    drafted, plain = engine(shapes), engine(shapes, draft=None)
    assert drafted.fingerprint == plain.fingerprint
    answers = drafted.generate(requests(3, 12))
    assert [answer.tokens for answer in answers] == [each.tokens for each in plain.generate(requests(3, 12))]
    assert all(len(answer.tokens) == 12 and answer.text == "" for answer in answers)
    assert all(answer.usage.drafted_tokens > 0 for answer in answers)


@pytest.mark.parametrize("request_", [Request(text="hello"), Request(messages=[Message("user", "x")])])
def test_text_is_refused_with_the_way_out(shapes, request_):
    with pytest.raises(BadPrompt, match="give token_ids"):
        engine(shapes, draft=None).generate(request_)


@pytest.mark.parametrize(("mean", "block"), [(1.0, 16), (3.0, 8), (6.5, 16), (8.0, 8)])
def test_the_rate_gives_the_mean_of_a_block(mean, block):
    rate = acceptance_rate(mean, block)
    expected = block if rate > 0.999999 else (1 - rate**block) / (1 - rate)
    assert expected == pytest.approx(mean, rel=1e-5)


def test_only_drafted_tokens_are_made_up_and_a_wrong_one_is_no_token():
    num = 4000
    fed, said = torch.arange(num) + 1000, torch.arange(num, dtype=torch.int32)
    sequence = torch.full((num,), 3, dtype=torch.int32)
    position, drafted = torch.arange(num, dtype=torch.int32), torch.arange(num) % 4 > 0
    simulated = SimulatedAcceptance(4.0, 8, CPU)
    compared = simulated.compared(fed, sequence, position, drafted, said)
    assert compared.dtype == torch.int64
    assert torch.equal(compared[~drafted], fed[~drafted])
    right = compared[drafted] == said[drafted]
    assert bool((compared[drafted][~right] == -1).all())
    assert float(right.float().mean()) == pytest.approx(acceptance_rate(4.0, 8), abs=0.03)


@pytest.mark.slow
# Rows of padding hold what was never written, which nothing reads.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_simulated_acceptance_gives_about_as_many_tokens_a_verify_step(shapes):
    made_up = engine(shapes, ops="triton", simulated_acceptance=2.5, max_num_seqs=4, prefix_caching=False)
    answers = made_up.generate(requests(4, 19))
    assert all(len(answer.tokens) == 19 for answer in answers)
    steps = sum(answer.usage.steps for answer in answers)
    accepted = sum(answer.usage.accepted_tokens for answer in answers)
    assert (accepted + steps) / steps == pytest.approx(2.5, rel=0.2)


def test_simulated_acceptance_cannot_be_had_with_a_checkpoint_or_on_the_host(shapes):
    with pytest.raises(ConfigError, match="needs weights: random"):
        EngineConfig(model=shapes, simulated_acceptance=3)
    with pytest.raises(ConfigError, match="choose on the device"):
        engine(shapes, simulated_acceptance=3)
    with pytest.raises(ConfigError, match="more than block_length 4"):
        engine(shapes, ops="triton", simulated_acceptance=5)
