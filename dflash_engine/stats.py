"""Counters of one engine since it started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    waiting: int = 0
    running: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_ns: int = 0
    """Time inside steps; the requests' shares add up to it, but for what was aborted."""
    prompt_tokens: int = 0
    """Computed: not those from the prefix cache, and again after a preemption."""
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
