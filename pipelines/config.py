"""What a batch job is asked to do: one model for the YAML file, `--set` and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_engine.config import EngineConfig
from dflash_engine.request import SamplingParams
from pipelines.errors import JobRefused


class Section(BaseModel):
    """Base of the sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardConfig(Section):
    """How the input is cut; the cut decides the names of the parts, so it stays for a whole job."""

    rows: int = Field(default=256, ge=1)
    """Most rows of a shard."""
    bytes: int = Field(default=4 << 20, ge=1)
    """Most input bytes of a shard, one line more at the end."""


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
    prices: PricesConfig = Field(default_factory=PricesConfig)
    tags: dict[str, str] = Field(default_factory=dict)
    """Carried into the manifest, for whoever shares out the bill."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first rows of the input."""
    seed: int = Field(default=0, ge=0)
    """Rows without a seed get one from this and their row_id."""
    format: Literal["parquet", "jsonl"] = "parquet"


def load_config(path: str, settings: list[str], **values: object) -> BatchConfig:
    """The config of a YAML file, changed by `dotted.key=value` settings, then by `values` that are not None.

    Raises `JobRefused` in one sentence for a missing file, bad YAML, an unknown key or a wrong value.
    """
    tree = _read_yaml(path)
    for setting in settings:
        _apply(tree, setting)
    tree.update({name: value for name, value in values.items() if value is not None})
    try:
        return BatchConfig(**tree)
    except ValidationError as error:
        raise JobRefused(f"{path}: {_first_problem(error)}") from error


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise JobRefused(f"config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JobRefused(f"config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise JobRefused(f"config {path} is not a mapping of settings")
    return tree


def _apply(tree: dict[str, Any], setting: str) -> None:
    """Put one `dotted.key=value` into the tree; the value is read as YAML, so 3 is a number."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise JobRefused(f"--set {setting}: write it as dotted.key=value")
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise JobRefused(f"--set {setting}: {section} is a value, not a section")
    try:
        tree[name] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobRefused(f"--set {setting}: the value is not YAML") from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {place}"
    if problem["type"] == "missing":
        return f"setting {place} is missing"
    reason = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {reason.replace('Extra inputs are not permitted', 'unknown setting')}"
