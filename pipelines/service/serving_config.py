"""What `jobs/serve_online.py` is asked for: engines, HTTP side, replicas, health, ledger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError, describe
from dflash_engine.yaml_settings import Section, read_settings
from pipelines.service.config import ServiceConfig
from pipelines.storage_config import StorageConfig


class ReplicasConfig(Section):
    """Engines, each one a Serve replica with GPUs of its own, or with the cores of a machine without any."""

    min: int = Field(default=1, ge=1)
    max: int | None = Field(default=None, ge=1)
    """Default is one for each GPU of the cluster (or `tensor_parallel_size` of them), one without GPUs."""
    target_requests: float | None = Field(default=None, gt=0)
    """Requests running and waiting for an engine, on average, above which another engine is started; default
    is what an engine runs at once (`engine.max_num_seqs`)."""
    max_requests: int | None = Field(default=None, ge=1)
    """Requests that an engine is given at once; those above `engine.max_num_seqs` wait in it. Default is
    twice that."""
    max_queued: int = Field(default=1024, ge=1)
    """Requests that wait for a place in an engine; one more gets 429."""
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)
    shards_in_flight: int = Field(default=4, ge=0)
    """Shards of batch jobs (`pool: serve`) that an engine works on together when it has slack; 0 for none."""

    @model_validator(mode="after")
    def _min_is_not_above_max(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max = {self.max} is less than min = {self.min}")
        return self


class HealthConfig(Section):
    """How often and how patiently Serve asks; `service.stall_limit_s` says when an engine is stuck."""

    period_s: float = Field(default=2.0, gt=0)
    """How often each replica is asked."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long it may take to answer; after three times it is replaced."""


class ServingConfig(Section):
    """Everything that a service is asked for, checked once and then frozen."""

    name: str = Field(default="dflash", pattern=r"^[A-Za-z0-9_-]+$")
    """Of the application in Serve; batch jobs find it by its model."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    service: ServiceConfig = Field(default_factory=ServiceConfig)
    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    ingresses: int = Field(default=1, ge=1)
    """HTTP processes; each counts limits of keys and `service.max_requests` for itself."""
    drain_s: float = Field(default=600.0, gt=0)
    """How long answers that run may go on when the service ends or is deployed anew."""
    ledger: str | None = None
    """Folder or URI that usage records go to, under date=YYYY-MM-DD/; none are kept without."""
    ledger_flush_s: float = Field(default=10.0, gt=0)
    """How much of the ledger a crash may cost, at most."""
    storage: StorageConfig = Field(default_factory=StorageConfig)


def load_serving(path: str, settings: list[str], **service: object) -> ServingConfig:
    """The config of a YAML file, changed by `dotted.key=value` settings, then by values of its `service`
    section that are not None. Raises `ConfigError` in one sentence."""
    tree = read_settings(Path(path), settings)
    given = {name: value for name, value in service.items() if value is not None}
    if given:
        tree["service"] = {**(tree.get("service") or {}), **given}
    return checked(tree, path)


def checked(tree: Mapping[str, Any], source: str) -> ServingConfig:
    """Raises `ConfigError` that names the source and the setting."""
    try:
        return ServingConfig.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe(error.errors())}") from error
