"""What a run needs before its first step: shapes, data that was looked at, answers to measure on."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash_engine.bench_prompts import chat_prompts
from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.model_config import DraftConfig
from dflash_engine.request import SamplingParams
from dflash_engine.sources import Sources
from dflash_engine.tokenizer import Tokenizer
from dflash_engine.training.checks import TrainingCheckFailed, check_corpus
from dflash_engine.training.config import TrainConfig
from dflash_engine.training.contamination import contaminated
from dflash_engine.training.corpus import Corpus, corpus_of, load_corpus, save_corpus, split_held_out
from dflash_engine.training.draft_weights import draft_config
from dflash_engine.training.generation import answer
from dflash_engine.training.target import find_target

AT_ONCE = {"cpu": 16, "cuda": 256}
"""Evaluation prompts that are answered together."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Data and shapes of a run."""

    sources: Sources
    draft: DraftConfig
    training: Corpus
    held_out: dict[str, Corpus]
    """By name; `held_out` is what was kept apart of the training pool."""
    num_contaminated: int
    corpus_digest: str


def prepare(config: TrainConfig, device: torch.device) -> Prepared:
    """Raises `ConfigError`."""
    sources = find_target(config, device)
    draft = draft_config(config.draft, sources.model)
    whole = load_corpus(config.data.paths, config.data.max_sequences)
    digest = whole.digest
    row_tokens = config.data.row_tokens
    clean, num_contaminated = _clean(config, sources.folder, whole, digest)
    training, held_out = split_held_out(clean.clipped(row_tokens), config.data.held_out, config.run.seed)
    check_corpus(training, config.checks, draft.mask_token_id)
    sets = {"held_out": held_out} if len(held_out) else {}
    for name, answers in evaluation_answers(config, device).items():
        sets[name] = answers.clipped(row_tokens)
    return Prepared(sources, draft, training, sets, num_contaminated, digest)


def evaluation_answers(config: TrainConfig, device: torch.device) -> dict[str, Corpus]:
    """The target's greedy answers to the first prompts of each set, made once and kept beside the draft.

    Raises `ConfigError`.
    """
    asked = config.evaluation
    folder = Path(config.output) / "evaluation"
    files = {name: folder / f"{name}-{asked.prompts}-{asked.max_tokens}.npz" for name in asked.sets}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        prompts = {
            name: chat_prompts(config.target, [Path(asked.sets[name])], asked.prompts) for name in missing
        }
        longest = max(len(prompt) for some in prompts.values() for prompt in some) + asked.max_tokens + 64
        at_once = AT_ONCE[device.type]
        core = EngineCore(
            EngineConfig(
                model=config.target,
                draft="none",
                dtype=config.run.dtype,
                device=str(device),
                max_num_seqs=at_once,
                kv_cache_tokens=at_once * longest,
            )
        )
        for name in missing:
            sampling = [SamplingParams(max_tokens=asked.max_tokens)] * len(prompts[name])
            answers = answer(core, prompts[name], sampling)
            pairs = [(prompt, said) for prompt, said in zip(prompts[name], answers, strict=True) if said]
            save_corpus(corpus_of(pairs, 1 << 20), files[name])
        del core
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {name: load_corpus([str(file)]) for name, file in files.items()}


def _clean(config: TrainConfig, folder: Path, corpus: Corpus, digest: str) -> tuple[Corpus, int]:
    """Without the sequences whose prompts repeat an evaluation prompt; found once and kept."""
    files = [Path(path) for path in (*config.evaluation.sets.values(), *config.checks.keep_apart)]
    if not files or config.weights == "random":
        return corpus, 0
    kept = Path(config.output) / "contaminated.json"
    key = [digest, *map(str, files)]
    known = json.loads(kept.read_text()) if kept.is_file() else {}
    if known.get("of") != key:
        found = contaminated(corpus, Tokenizer.load(folder), files)
        known = {"of": key, "sequences": found.tolist()}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(known) + "\n")
    found = np.array(known["sequences"], dtype=np.int64)
    if len(found) and config.checks.contaminated == "refuse":
        raise TrainingCheckFailed(
            "evaluation_prompts_in_training_data",
            f"{len(found):,} of {len(corpus):,} sequences have a prompt that repeats one of an "
            "evaluation set; checks.contaminated: drop leaves them out",
        )
    return corpus.take(np.setdiff1d(np.arange(len(corpus)), found)), len(found)
