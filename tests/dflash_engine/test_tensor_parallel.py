"""A model divided among four ranks, simulated by threads: two would hide a mistake in their order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_engine import DFlashEngine, Request, SamplingParams, loading
from dflash_engine.batching import Segment, forward_batch
from dflash_engine.checkpoint import Checkpoint
from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError
from dflash_engine.kv_cache import KVCache
from dflash_engine.layers import WeightReader
from dflash_engine.model_config import read_model_config
from dflash_engine.models.target import TargetModel
from dflash_engine.plan import RowPlan
from dflash_engine.runner import Runner
from dflash_engine.shard import Rank, Shard
from kernels.parallel_ops import ParallelReferenceOps
from kernels.reference import ReferenceOps
from tests.dflash_engine.exactness import (
    assert_every_way_gives_the_same,
    together,
    with_sampling,
)
from tests.dflash_engine.test_exactness import prompts
from tests.dflash_engine.test_experts import rewrite
from tests.dflash_engine.thread_ranks import ThreadCrew, on_every_rank
from tests.helpers import assert_close, tiny_draft_folder, tiny_model_folder

SIZE = 4
CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [2]}),
}
TOLERANCE = {F32: 1e-5, BF16: 3e-2}
"""RMS ratios of logits behind four layers: in bfloat16 sums are rounded at other places than in the whole."""


def folder_of(tmp_path: Path, name: str, **overrides: Any) -> Path:
    architecture, settings = MODELS[name]
    return tiny_model_folder(tmp_path, architecture, **{**HEADS, **settings, **overrides})


@pytest.fixture
def crews(monkeypatch):
    """Engines start threads in place of processes; the crews that were made."""
    made: list[ThreadCrew] = []

    def start(config: EngineConfig, device: torch.device) -> ThreadCrew:
        made.append(ThreadCrew(config, device))
        return made[-1]

    monkeypatch.setattr(loading, "Crew", start)
    yield made
    for crew in made:
        crew.close()
        crew.check()


def logits(folder: Path, ops: Any, shard: Shard, dtype: torch.dtype) -> Tensor:
    """Of 21 tokens, the first of them in a pass of their own."""
    model = TargetModel(read_model_config(folder), Checkpoint(folder), ops, dtype, CPU, 64, shard)
    cache = KVCache(model.kv_shape, 8, 8, dtype, CPU)
    tokens = torch.arange(21) * 7 % 300
    found = []
    for start, end in ((0, 8), (8, 21)):
        batch = forward_batch([Segment(start, end - start, range(8))], model.spans, 8, CPU)
        hidden, _ = model.forward(tokens[start:end], batch, cache, ())
        found.append(model.logits(hidden))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_has_the_same_bits_and_together_they_are_the_model(tmp_path, name, dtype):
    folder = folder_of(tmp_path, name, dtype=dtype)

    def work(rank: Rank) -> Tensor:
        return logits(folder, ParallelReferenceOps(rank.group), rank.shard, dtype)

    first, *others = on_every_rank(SIZE, work)
    assert all(torch.equal(first, other) for other in others)
    with torch.inference_mode():
        whole = logits(folder, ReferenceOps(), Shard(), dtype)
    assert_close(name, whole, first, TOLERANCE[dtype])


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_the_whole_model_in_float32(tmp_path, crews, name):
    target = folder_of(tmp_path, name, dtype=F32)
    settings = {
        "draft": str(tiny_draft_folder(tmp_path, target, dtype=F32)),
        "ops": "reference",
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 112,
        "kv_cache_tokens": 2000,
    }
    requests = with_sampling(prompts(4, longest=24), ["greedy", "everything"], 12)
    whole = DFlashEngine(str(target), **settings)
    expected = together(whole, requests)
    divided = DFlashEngine(str(target), tensor_parallel_size=SIZE, **settings)
    found = together(divided, requests)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    assert divided.fingerprint != whole.fingerprint
    assert divided.memory.target_kv_bytes * SIZE == whole.memory.target_kv_bytes
    assert len(crews) == 1 and crews[0].sizes


def test_every_way_of_running_gives_the_same_within_one_size(tmp_path, crews, monkeypatch):
    target = folder_of(tmp_path, "qwen3")
    draft = str(tiny_draft_folder(tmp_path, target))
    settings = {"ops": "reference", "device": "cpu", "threads": 1, "tensor_parallel_size": SIZE}
    build = partial(DFlashEngine, str(target), max_model_len=64, kv_cache_tokens=1000, **settings)
    requests = with_sampling(prompts(4, longest=24), ["greedy", "everything"], 20)
    expected = assert_every_way_gives_the_same(build, requests, 76, draft, thorough=False)
    assert together(build(draft=draft, max_step_tokens=10), requests) == expected
    texts = {
        request.sampling.seed: (*request.token_ids, *tokens)
        for request, (tokens, *_) in zip(requests, expected, strict=True)
    }

    def often_right(_: Runner, rows: Sequence[RowPlan]) -> dict[int, list[int]]:
        """The same on every rank, as a draft's guesses are: right but at every third position."""
        guesses = {}
        for row in rows:
            places = range(row.start + 1, row.start + 1 + row.num_draft)
            text = texts[row.seed]
            guesses[row.seq_id] = [text[at] if at < len(text) and at % 3 else 0 for at in places]
        return guesses

    monkeypatch.setattr(Runner, "_draft_tokens", often_right)
    engine = build(draft=draft)
    assert together(engine, requests) == expected
    assert engine.stats().accepted_tokens > 0.2 * engine.stats().drafted_tokens


def test_workers_are_told_no_prompts_but_where_a_choice_depends_on_them(tmp_path, crews):
    target = folder_of(tmp_path, "qwen3")
    settings = {"ops": "reference", "device": "cpu", "threads": 1, "tensor_parallel_size": SIZE}
    engine = DFlashEngine(str(target), draft=None, max_model_len=500, kv_cache_tokens=2000, **settings)
    sizes = {}
    for penalty in (1.0, 1.1):
        begin = len(crews[0].sizes)
        params = SamplingParams(max_tokens=3, ignore_eos=True, repetition_penalty=penalty)
        engine.generate(Request(token_ids=tuple(range(3, 300)), sampling=params))
        sizes[penalty] = crews[0].sizes[begin:]
    assert sizes[1.0][-1] < sizes[1.1][-1] - 297
    assert sizes[1.0][-1] < 1000


def parts_of(folder: Path, read: Any) -> list[Tensor]:
    """What `read` takes as each of the ranks, and last as a whole."""
    shards = [*(Shard(rank, SIZE) for rank in range(SIZE)), Shard()]
    return [read(WeightReader(Checkpoint(folder), ReferenceOps(), F32, CPU, shard)) for shard in shards]


def test_the_parts_of_a_matrix_are_the_whole(tmp_path):
    folder = tiny_model_folder(tmp_path, "llama", **HEADS, attention_bias=True, head_dim=16)
    prefix, query, kv = "model.layers.1.self_attn", 8 * 16, 4 * 16

    def read(reader: WeightReader) -> list[Tensor]:
        mixed = reader.fused(prefix, {"q_proj": query, "k_proj": kv, "v_proj": kv}, 64, bias=True)
        output = reader.summed(f"{prefix}.o_proj", 64, query, bias=True)
        return [mixed.weight.matrix, mixed.bias, output.weight.matrix, output.bias]

    *ranks, whole = parts_of(folder, read)
    for place in (0, 1):
        groups = [part[place].split([query // SIZE, kv // SIZE, kv // SIZE]) for part in ranks]
        joined = torch.cat([torch.cat(each) for each in zip(*groups, strict=True)])
        assert torch.equal(joined, whole[place])
    assert torch.equal(torch.cat([part[2] for part in ranks], dim=1), whole[2])
    assert all(torch.equal(part[3], whole[3]) for part in ranks)
    assert not any(torch.equal(part[2], ranks[0][2]) for part in ranks[1:])


@pytest.mark.parametrize("in_one_tensor", [False, True])
def test_the_parts_of_experts_are_the_whole(tmp_path, in_one_tensor):
    folder = tiny_model_folder(tmp_path, "qwen3_moe", **HEADS)
    rewrite(folder, whole=in_one_tensor)
    prefix, inner = "model.layers.1.mlp.experts", 32

    def read(reader: WeightReader) -> list[list[Tensor]]:
        names = {"gate_proj": inner, "up_proj": inner}
        first = reader.experts(prefix, names, "gate_up_proj", 64, 8, dim=0)
        second = reader.experts(prefix, {"down_proj": 64}, "down_proj", inner, 8, dim=1)
        return [[weight.matrix for weight in weights] for weights in (first, second)]

    *ranks, whole = parts_of(folder, read)
    for expert in range(8):
        halves = [part[0][expert].chunk(2) for part in ranks]
        joined = torch.cat([torch.cat(each) for each in zip(*halves, strict=True)])
        assert torch.equal(joined, whole[0][expert])
        assert torch.equal(torch.cat([part[1][expert] for part in ranks], dim=1), whole[1][expert])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_key_value_heads": 2},
            "tensor_parallel_size 4 does not divide the 2 key/value heads of .*; sizes that do: 1, 2$",
        ),
        ({"intermediate_size": 90}, "does not divide the 90 inner values of the MLP of .* 1, 2$"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused_with_the_numbers(tmp_path, changes, message):
    folder = folder_of(tmp_path, "qwen3", **changes)
    with pytest.raises(ConfigError, match=message):
        DFlashEngine(str(folder), draft=None, device="cpu", ops="reference", tensor_parallel_size=SIZE)


def test_the_draft_must_be_divisible_too(tmp_path):
    target = folder_of(tmp_path, "qwen3")
    draft = tiny_draft_folder(tmp_path, target, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=f"2 key/value heads of the draft {draft}"):
        DFlashEngine(str(target), str(draft), device="cpu", ops="reference", tensor_parallel_size=SIZE)


def test_experts_are_divided_by_their_own_width_and_an_unused_mlp_does_not_matter(tmp_path):
    config = read_model_config(folder_of(tmp_path, "qwen3_moe", intermediate_size=90, mlp_only_layers=[]))
    Shard(0, SIZE).check(config, "it")
    assert Shard(0, SIZE).share(config).experts.intermediate_size == 8
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 64 .* and 32 inner values of an expert"):
        Shard(0, 64).check(config, "it")


@pytest.mark.parametrize(
    ("settings", "gpus", "message"),
    [
        ({"device": "cpu"}, 0, "tensor_parallel_size 4 needs as many GPUs"),
        ({"device": "cuda"}, 2, "tensor_parallel_size 4 needs as many GPUs, this machine has 2"),
        ({"device": "cuda:1"}, 8, "device 'cuda:1' with tensor_parallel_size 4: use cuda, .* GPUs 0 to 3"),
        ({"device": "cpu", "exact": False}, 0, "exact: false .* tensor_parallel_size 1"),
    ],
)
def test_devices_that_cannot_be_are_refused_before_anything_starts(
    tmp_path, monkeypatch, settings, gpus, message
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    folder = folder_of(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=message):
        DFlashEngine(str(folder), draft=None, tensor_parallel_size=SIZE, **settings)
