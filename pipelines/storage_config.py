"""How object stores are reached: the `storage` section of a config. Credentials never stand here."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from dflash_engine.yaml_settings import Section

LONGEST_PAUSE_S = 20.0


class StorageConfig(Section):
    """Endpoint, region and patience for S3 and what speaks its protocol.

    Credentials come from the usual places only: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile's
    file, or the role of the machine. Every machine of a cluster needs them.
    """

    endpoint_url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    """Default is AWS_ENDPOINT_URL_S3, then AWS_ENDPOINT_URL, then the profile's, then Amazon's."""
    region: str | None = None
    """Default is AWS_REGION, then AWS_DEFAULT_REGION, then the profile's."""
    profile: str | None = None
    """A profile of the AWS config and credentials files; default is AWS_PROFILE."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Bucket in the path or in the host name; auto is the path where an endpoint is given."""
    anonymous: bool = False
    """Unsigned requests, for public buckets."""
    max_attempts: int = Field(default=10, ge=1)
    """Tries of a request that is throttled, answered by a 5xx, or cut off; about 30 s with the default."""
    backoff_s: float = Field(default=0.2, gt=0)
    """Pause before the second try; doubled for each further one, up to 20 s."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest silence of the other side before a try counts as failed."""

    def resolved(self) -> StorageConfig:
        """With what this process's environment says; a store takes it to machines that do not have it."""
        found = {
            "endpoint_url": self.endpoint_url or _first_variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
            "region": self.region or _first_variable("AWS_REGION", "AWS_DEFAULT_REGION"),
            "profile": self.profile or _first_variable("AWS_PROFILE"),
        }
        return self.model_copy(update=found)

    def pauses(self) -> Iterator[float]:
        """Seconds to wait between tries: growing, and spread so that clients do not come back together."""
        for number in range(self.max_attempts - 1):
            yield random.uniform(0.5, 1) * min(LONGEST_PAUSE_S, self.backoff_s * 2**number)


def _first_variable(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)
