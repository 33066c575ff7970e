"""A random target, its own responses, and a training run of seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.request import SamplingParams
from dflash_engine.training.config import TrainConfig
from dflash_engine.training.corpus import Corpus, corpus_of, save_corpus
from dflash_engine.training.generation import answer
from tests.helpers import MASK_TOKEN_ID, tiny_model_folder

ROW_TOKENS = 48
CPU = torch.device("cpu")


def target_folder(tmp_path: Path, **changes: Any) -> Path:
    """Untied weights that are large enough for answers that differ."""
    return tiny_model_folder(tmp_path, "llama", dtype=torch.float32, std=0.05, **changes)


def responses(target: Path, num: int, max_tokens: int = 24, seed: int = 0) -> Corpus:
    """The target's greedy answers to random prompts, by plain decoding."""
    core = EngineCore(
        EngineConfig(
            model=str(target), draft=None, dtype="float32", device="cpu", threads=1, max_model_len=128
        )
    )
    generator = torch.Generator().manual_seed(seed)
    prompts = [tuple(torch.randint(3, 43, (3 + i % 9,), generator=generator).tolist()) for i in range(num)]
    answers = answer(core, prompts, [SamplingParams(max_tokens=max_tokens)] * num)
    return corpus_of(list(zip(prompts, answers, strict=True)), 320)


def config_for(target: Path, data: Path, output: Path, **changes: Any) -> TrainConfig:
    """`changes` are whole sections."""
    sections: dict[str, Any] = {
        "target": str(target),
        "output": str(output),
        "data": {"paths": [str(data)], "row_tokens": ROW_TOKENS, "held_out": 16},
        "draft": {"layers": 2, "block_size": 6, "mask_token_id": MASK_TOKEN_ID, "context_layers": [0, 2]},
        "batch": {"rows": 8, "anchors": 12},
        "budget": {"steps": 200},
        "optimizer": {"lr": 3e-3, "warmup": 0.05},
        "features": {"batch_tokens": 512},
        "evaluation": {"every": 100},
        "checks": {"min_response_tokens": 100},
        "run": {"device": "cpu", "dtype": "float32", "log_every": 50, "checkpoint_every": 50},
    }
    return TrainConfig(**(sections | changes))


def write_data(target: Path, folder: Path, num: int = 600, **changes: Any) -> Path:
    save_corpus(responses(target, num, **changes), folder / "part-0.npz")
    return folder
