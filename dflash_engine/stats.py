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
    """Time of the rounds; the requests' shares and `discarded_ns` add up to it, but for what was aborted."""
    discarded_ns: int = 0
    """Share of rows that were in flight when their request ended: work that nobody asked for."""
    discarded_tokens: int = 0
    """Query tokens of these rows, fed and drafted."""
    prompt_tokens: int = 0
    """Computed: not those from the prefix cache, and again after a preemption."""
    completion_tokens: int = 0
    drafts: int = 0
    """Passes of one request in which it had drafted tokens verified."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks that sequences hold; what the prefix cache keeps is free."""

    @property
    def acceptance_length(self) -> float:
        """Tokens of a pass with a draft, the target's own included; 0 before the first one."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0
