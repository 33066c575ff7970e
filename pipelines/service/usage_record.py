"""What one choice of an answer used."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_engine.request import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What one choice used, for whoever writes the bill. An aborted one has the tokens that were sent."""

    owner: str
    request_id: str
    usage: Usage
    finished: bool
    finish_reason: FinishReason = "abort"
    duration_s: float = 0.0
    """From the request's admission to its result, or to where it was left."""
    ttft_s: float | None = None
    """Until its first tokens; None where none came."""
