"""What the service is asked to be: address, limits, keys, CORS."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipelines.service.batches_config import BatchesConfig


class ServiceConfig(BaseModel):
    """Settings of the HTTP side, checked once and then frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    keys: Path | None = None
    """YAML file of hashed API keys (`pipelines.service.keys` makes entries)."""
    allow_anonymous: bool = False
    """Serve other machines without keys: everybody who reaches the port may use the engine."""
    model_name: str | None = None
    """Name in answers and in /v1/models; default is the engine's model name."""
    model_aliases: tuple[str, ...] = ()
    """Other names by which clients may ask for it."""
    max_body_bytes: int = Field(default=32 << 20, ge=1)
    max_requests: int = Field(default=1024, ge=1)
    """Answers in the engine at once, running and waiting; one more gets 429. Each choice of `n` counts."""
    max_choices: int = Field(default=16, ge=1)
    """Most `n` of a request, times the prompts of a completion."""
    stall_limit_s: float = Field(default=60.0, gt=0)
    """After so long without a finished round, though there is work, /health says that the engine is stuck."""
    retry_after_s: float = Field(default=1.0, gt=0)
    """What a client is told to wait when the queue is full."""
    default_temperature: float = Field(default=1.0, ge=0, le=2)
    """Where a request names none: 1 is what both APIs document."""
    default_max_tokens: int | None = Field(default=None, ge=1)
    """`max_tokens` of chats that name none; default is what the context has room for."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the service, or `*`; none by default."""
    page: bool | None = None
    """A page at `/` to chat and to watch; by default where only this machine reaches the service."""
    metrics_owners: tuple[str, ...] = ()
    """Owners whose keys may read /metrics, which has figures of all owners; without keys anybody may."""
    access_log: bool = True
    """A line of JSON for each request on stderr of the process (logger `dflash_ray.access`)."""
    prices: str = "configs/prices.yaml"
    accelerator: str | None = None
    """Whose price in `prices` an hour of a GPU has; default is what the cluster has, if of one kind."""
    batches: BatchesConfig | None = None
    """A place for files and batches; without it there are none."""

    @model_validator(mode="after")
    def _strangers_need_keys(self) -> Self:
        if self.keys is None and not self.allow_anonymous and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines: name a file of keys, or set "
                "allow_anonymous to serve everybody"
            )
        return self

    @property
    def shows_page(self) -> bool:
        return is_loopback(self.host) if self.page is None else self.page


def is_loopback(host: str) -> bool:
    """True for an address of this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
