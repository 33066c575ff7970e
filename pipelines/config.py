"""What a batch job is asked to do: one model for the YAML file, `--set` and the command line."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError
from dflash_engine.request import SamplingParams
from dflash_engine.yaml_settings import Section, read_settings
from pipelines.errors import JobRefused
from pipelines.lines import MAX_LINE_BYTES
from pipelines.part_format import Format
from pipelines.storage_config import StorageConfig


class ShardConfig(Section):
    """How the input is cut; the cut decides the names of the parts, so it stays for a whole job."""

    rows: int = Field(default=256, ge=1)
    """Most rows of a shard."""
    bytes: int = Field(default=4 << 20, ge=1)
    """Most input bytes of a shard, one line more at the end."""
    max_line_bytes: int = Field(default=MAX_LINE_BYTES, ge=1)
    """Longest line that is read; a longer one becomes an error row."""
    max_lost_s: float | None = Field(default=None, gt=0)
    """Most engine time that a lost shard may cost, by `tokens_per_s`: it bounds the rows too."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """What one engine is expected to generate; an estimate that stays for the whole job, as the cut does."""

    @model_validator(mode="after")
    def _lost_time_needs_a_speed(self) -> ShardConfig:
        if self.max_lost_s is not None and self.tokens_per_s is None:
            raise ValueError("max_lost_s needs tokens_per_s")
        return self


class ActorsConfig(Section):
    """Engines at work; each takes one GPU, or the CPU cores of a machine without any."""

    min: int = Field(default=1, ge=1)
    max: int | None = Field(default=None, ge=1)
    """Default is one for each GPU of the cluster, or one where there is none."""
    shards_in_flight: int = Field(default=4, ge=1)
    """Shards that an actor works on together, so that no row waits for a slow one."""

    @model_validator(mode="after")
    def _min_is_not_above_max(self) -> ActorsConfig:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max = {self.max} is less than min = {self.min}")
        return self


class TriesConfig(Section):
    """How often something is tried before it counts as failed."""

    row: int = Field(default=3, ge=1)
    """A row at which the engine fails, but not the whole engine."""
    start: int = Field(default=3, ge=1)
    """An actor's engine that does not start; the job ends then."""
    crash: int = Field(default=2, ge=1)
    """A row that kills the engine while it is alone in it; it gets an error row then."""


class PricesConfig(Section):
    """Where prices stand and which one holds."""

    path: str = "configs/prices.yaml"
    accelerator: str | None = None
    """A name in the price file; default is what Ray finds on the actor's machine."""


class BatchConfig(Section):
    """Everything that a batch job is asked for, checked once and then frozen."""

    input: str
    """File, folder or glob of JSONL (plain, .gz, .zst) or Parquet."""
    output: str
    """Folder that the parts and the manifest go to."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    """Used where a row says nothing of its own."""
    shard: ShardConfig = Field(default_factory=ShardConfig)
    actors: ActorsConfig = Field(default_factory=ActorsConfig)
    tries: TriesConfig = Field(default_factory=TriesConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    prices: PricesConfig = Field(default_factory=PricesConfig)
    budget_usd: Decimal | None = Field(default=None, gt=0)
    """Stop admitting shards when the rows written have cost this much, those of earlier runs included."""
    pool: Literal["own", "serve", "auto"] = "auto"
    """Engines of its own, those of a service that runs in the cluster (`jobs/serve_online.py`) in what online
    requests leave free, or these where the service has this model, else own ones."""
    max_error_rate: float | None = Field(default=None, gt=0, le=1)
    """End the job early once at least this share of its rows have failed."""
    retry_errors: bool = False
    """Do the rows again that failed in earlier runs."""
    repairs: str | None = None
    """File of lines from `errors/` that were put right; they fill the gaps of the same output."""
    lease_s: float = Field(default=30.0, gt=0)
    """How long a driver that has gone silent keeps its output for itself."""
    lost_after_s: float = Field(default=900.0, gt=0)
    """How long a job waits for a cluster in which none of its own engines is alive; then it ends."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Carried into the manifest, for whoever shares out the bill."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first rows of the input."""
    seed: int = Field(default=0, ge=0)
    """Rows without a seed get one from this and their row_id."""
    format: Format = "parquet"
    """`openai`: lines of OpenAI's Batch API, failed rows included; carried columns are left out."""
    dedupe: bool = False
    """Compute the same request once in a shard, where rule says that its answers are the same."""
    output_token_ids: bool = False
    """Add the columns `prompt_token_ids` and `token_ids`, as training of a draft takes them."""


def load_config(path: str, settings: list[str], **values: object) -> BatchConfig:
    """The config of a YAML file, changed by `dotted.key=value` settings, then by `values` that are not None.

    Raises `JobRefused` in one sentence for a missing file, bad YAML, an unknown key or a wrong value.
    """
    try:
        tree = read_settings(Path(path), settings)
    except ConfigError as error:
        raise JobRefused(str(error)) from error
    tree.update({name: value for name, value in values.items() if value is not None})
    try:
        return BatchConfig(**tree)
    except ValidationError as error:
        raise JobRefused(f"{path}: {_first_problem(error)}") from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {place}"
    if problem["type"] == "missing":
        return f"setting {place} is missing"
    reason = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {reason.replace('Extra inputs are not permitted', 'unknown setting')}"
