"""The GPU kernels on several ranks: as processes in the interpreter, and on GPUs where there are some."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch

from dflash_engine import DFlashEngine, Request, SamplingParams
from dflash_engine.errors import EngineDead
from dflash_engine.graphs import Graphs
from dflash_engine.process_group import ProcessGroup, open_store
from tests.dflash_engine.exactness import assert_every_way_gives_the_same, together, with_sampling
from tests.dflash_engine.test_exactness import prompts
from tests.helpers import tiny_draft_folder, tiny_model_folder

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding in the interpreter
def test_two_processes_with_the_gpu_kernels_give_the_answers_of_one_with_plain_torch(tmp_path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "dtype": torch.float32,
    }
    target = tiny_model_folder(tmp_path, "llama", **sizes)
    dflash = {"mask_token_id": 304, "target_layer_ids": [0]}
    shape: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 32, "block_size": 3}
    draft = tiny_draft_folder(tmp_path, target, dtype=torch.float32, dflash_config=dflash, **shape)
    settings: dict[str, Any] = {
        "draft": str(draft),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 64,
        "kv_cache_tokens": 400,
        "max_num_seqs": 2,
        "max_step_tokens": 16,
    }
    requests = with_sampling([tuple(range(5, 11)), tuple(range(6, 12))], ["greedy", "top_k"], 3)
    requests.append(Request(token_ids=(9, 8, 7), sampling=SamplingParams(max_tokens=2, logprobs=1)))
    expected = together(DFlashEngine(str(target), ops="reference", **settings), requests)
    engine = DFlashEngine(str(target), ops="triton", tensor_parallel_size=2, **settings)
    runner: Any = engine._core._pipeline._runner
    (process,) = runner._followers._watch._processes
    found = together(engine, requests)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="rank 1 of 2 has ended"):
        engine.generate(requests[0])


@pytest.mark.gpu
def test_what_nccl_gathers_can_be_captured_and_replayed_and_the_group_ended():
    """One rank, which is all that a single GPU takes: it shows that the calls exist and can be captured."""
    device = torch.device("cuda", 0)
    group = ProcessGroup(open_store(), 0, 1, device)
    part, out = torch.zeros(3, 5, device=device), torch.empty(1, 3, 5, device=device)
    graphs = Graphs(device)
    for value in (1.0, 2.0, 3.0):
        part.fill_(value)
        graphs.run("gather", lambda: out.copy_(group.all_gather(part)))
        assert out.unique().tolist() == [value]
    assert len(graphs) == 1
    group.abort()


@pytest.mark.gpu
@pytest.mark.timeout(900)
@two_gpus
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_every_way_of_running_gives_the_same_on_two_gpus(tmp_path, architecture):
    target = tiny_model_folder(tmp_path, architecture)
    draft = str(tiny_draft_folder(tmp_path, target))
    settings: dict[str, Any] = {"device": "cuda", "max_model_len": 112, "kv_cache_tokens": 2000}
    build = partial(DFlashEngine, str(target), tensor_parallel_size=2, **settings)
    requests = with_sampling(prompts(6, longest=24), ["greedy", "everything", "top_p"], 24)
    assert_every_way_gives_the_same(build, requests, 128, draft)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@two_gpus
def test_two_gpus_give_the_answers_of_one_in_float32(tmp_path):
    target = tiny_model_folder(tmp_path, "qwen3", dtype=torch.float32)
    draft = str(tiny_draft_folder(tmp_path, target, dtype=torch.float32))
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 112}
    requests = with_sampling(prompts(6, longest=24), ["greedy", "top_p"], 24)
    one, two = (
        together(
            DFlashEngine(str(target), draft, tensor_parallel_size=size, kv_cache_tokens=2000, **settings),
            requests,
        )
        for size in (1, 2)
    )
    assert [tokens for tokens, *_ in two] == [tokens for tokens, *_ in one]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@two_gpus
def test_a_gpu_rank_that_is_killed_ends_the_engine(tmp_path):
    target = tiny_model_folder(tmp_path, "qwen3")
    engine = DFlashEngine(
        str(target), None, device="cuda", tensor_parallel_size=2, max_model_len=112, kv_cache_tokens=2000
    )
    runner: Any = engine._core._pipeline._runner
    os.kill(runner._followers._watch._processes[0].pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="rank 1 of 2 has ended"):
        engine.generate(Request(token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=50)))
