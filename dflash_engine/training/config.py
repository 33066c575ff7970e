"""What a training run is asked to do: one model for the YAML file and `--set`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from dflash_engine.errors import ConfigError, describe
from dflash_engine.yaml_settings import Section, read_settings

SUMMARY = "summary.json"
"""In the output folder: what `train` returned the last time."""


class DataConfig(Section):
    """The target's own responses, and how they are cut."""

    paths: tuple[str, ...] = ()
    """Folders or files: .npz in the layout of `dflash_engine.training.corpus`, or Parquet of a batch job."""
    row_tokens: int = Field(default=640, ge=8)
    """Sequences are packed into rows of this many tokens; longer ones lose their end."""
    held_out: int = Field(default=256, ge=0)
    """Sequences kept from training, for the acceptance length while it runs."""
    max_sequences: int | None = Field(default=None, ge=1)
    windows: int | None = Field(default=None, ge=1)
    """Parts of the rows whose features are on the device in turn; default is as few as fit."""
    window_steps: int | None = Field(default=None, ge=1)
    """Steps before the next window; default visits each one twice."""


class DraftSizes(Section):
    """The draft; what is left out is the target's."""

    layers: int = Field(default=5, ge=1)
    block_size: int = Field(default=16, ge=2, le=64)
    mask_token_id: int = Field(ge=0)
    """A token of the vocabulary that stands in no response."""
    context_layers: tuple[int, ...] | int = 5
    """0-based layers of the target whose outputs are the context, or how many, spread evenly."""
    intermediate_size: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    init_from: str | None = None
    """A draft folder of the same shape to go on from."""


class LossConfig(Section):
    """Cross-entropy of each position of a block, weighted."""

    kind: Literal["decay", "dpace"] = "decay"
    """`decay`: exp(-(k - 1) / gamma) for the k-th drafted token. `dpace`: by what the draft's own confidence
    makes a position worth (arXiv 2605.18810)."""
    gamma: float = Field(default=4.0, gt=0)
    alpha: float = Field(default=0.5, gt=0, le=1)
    """Smoothing of the confidence, for `dpace`."""
    chunk_mib: int = Field(default=1024, ge=1)
    """Logits that are in memory at once, in the compute dtype."""


class OptimizerConfig(Section):
    """AdamW without weight decay, or Muon for the matrices and AdamW for the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(default=1.5e-3, gt=0)
    muon_lr: float = Field(default=0.02, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = Field(default=0.02, ge=0, lt=1)
    """Fraction of the steps."""
    decay: float = Field(default=1.0, gt=0, le=1)
    """Last fraction of the steps, in which the rate falls to zero as a cosine."""
    clip: float = Field(default=1.0, gt=0)


class BatchSizes(Section):
    """Of one step, over all GPUs."""

    rows: int = Field(default=64, ge=1)
    anchors: int = Field(default=96, ge=1)
    """Blocks of each row."""


class Budget(Section):
    """How long the whole run is, over however many starts; steps, or seconds of training to be made steps of
    once a step has been measured."""

    steps: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("give steps or seconds")
        return self


class FeaturesConfig(Section):
    """Context features: outputs of the target's layers, computed once."""

    place: Literal["auto", "device", "disk", "recompute"] = "auto"
    """`device`: kept there, in windows if need be. `disk`: in a memory-mapped file. `recompute`: the target
    runs in every step. `auto`: device."""
    folder: str | None = None
    """For `disk`; default is `features` in the output folder."""
    batch_tokens: int = Field(default=32768, ge=64)
    """In one pass of the target."""
    reserve_gib: float = Field(default=28, ge=0)
    """Device memory left for the step itself."""


class EvaluationConfig(Section):
    """Acceptance length on prompts that are never trained on; the target answers them greedily, once."""

    every: int = Field(default=1000, ge=1)
    """Steps."""
    sets: dict[str, str] = Field(default_factory=dict)
    """Name and JSONL file with messages."""
    prompts: int = Field(default=64, ge=1)
    """Of each set."""
    max_tokens: int = Field(default=256, ge=2)


class ChecksConfig(Section):
    """What is looked at before hours are spent."""

    min_response_tokens: int = Field(default=1_000_000, ge=0)
    min_own_tokens: float = Field(default=0.5, ge=0, le=1)
    """Fraction of response tokens that have to be the target's own greedy choice."""
    against_engine: bool = True
    """Whether the engine's own draft has to give the same hidden states."""
    keep_apart: tuple[str, ...] = ()
    """More JSONL files of prompts that may not be trained on."""
    contaminated: Literal["drop", "refuse"] = "drop"


class GenerateConfig(Section):
    """Responses of the target to prompts, by this engine."""

    prompts: str = ""
    """JSONL with messages; .gz is fine."""
    output: str = ""
    max_tokens: int = Field(default=256, ge=2)
    temperatures: tuple[float, ...] = (0.0,)
    """The prompts are answered once at each, in this order."""
    shard_prompts: int = Field(default=8192, ge=1)
    limit: int | None = Field(default=None, ge=1)
    engine: dict[str, Any] = Field(default_factory=dict)


class RunConfig(Section):
    """How it is computed."""

    device: str = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of everything but the weights that are optimised, which are float32."""
    compile: bool = True
    """torch.compile, on a GPU."""
    cuda_graphs: bool = True
    seed: int = Field(default=0, ge=0)
    log_every: int = Field(default=50, ge=1)
    checkpoint_every: int = Field(default=500, ge=1)


class TrainConfig(Section):
    """Everything that a training run is asked for, checked once and then frozen."""

    target: str
    """An embedded model's name, a Hugging Face id, a folder, or a GGUF file."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """`random` reads config.json alone: for `--estimate`."""
    output: str
    """Folder of the draft, its checkpoints and its log."""
    draft: DraftSizes
    budget: Budget
    data: DataConfig = Field(default_factory=DataConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    batch: BatchSizes = Field(default_factory=BatchSizes)
    features: FeaturesConfig = Field(default_factory=FeaturesConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checks: ChecksConfig = Field(default_factory=ChecksConfig)
    generate: GenerateConfig = Field(default_factory=GenerateConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    licence: str = "Apache-2.0"
    """Of the trained draft, for its README."""
    data_note: str = ""
    """Where prompts and responses come from, for the README."""

    @property
    def digest(self) -> str:
        """Changes with everything that decides the trained weights."""
        tree = self.model_dump(mode="json", exclude={"output", "generate", "licence", "data_note"})
        for name in ("evaluation", "checks"):
            tree.pop(name)
        for key in ("log_every", "checkpoint_every", "device", "compile", "cuda_graphs"):
            tree["run"].pop(key)
        for key in ("folder", "batch_tokens", "reserve_gib", "place"):
            tree["features"].pop(key)
        return hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=8).hexdigest()


def load_train_config(path: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Raises `ConfigError` in one sentence for a missing file, bad YAML, an unknown key or a wrong value."""
    try:
        return TrainConfig(**read_settings(path, changes))
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error.errors())}") from error
