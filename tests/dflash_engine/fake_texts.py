"""What a fake target says, and a draft policy without reasons."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from dflash_engine.plan import RowPlan
from dflash_engine.request import Priority, SamplingParams

VOCABULARY = 3
PLAIN, ON_HOST = SamplingParams(), SamplingParams(logprobs=1)


def extend(digest: bytes, token: int) -> bytes:
    return blake2b(digest + bytes([token]), digest_size=16).digest()


@dataclass
class Text:
    """One sequence: what it is to become, and how much of it is committed."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: Priority
    arrival: int
    answer_length: int
    overhang: int
    """Tokens behind the longest answer that rounds to be thrown away may reach."""
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    """Prompt and whole answer, and more of it than will be asked for."""
    digests: list[bytes] = field(default_factory=list)
    """Digest of the text up to and including each position."""
    num_known: int = 0
    in_flight: list[RowPlan] = field(default_factory=list)
    steps_without_row: int = 0

    def __post_init__(self) -> None:
        self.num_known = len(self.prompt)
        digest = b""
        for position in range(len(self.prompt) + self.max_tokens + self.overhang):
            prompted = position < len(self.prompt)
            self.tokens.append(self.prompt[position] if prompted else digest[0] % VOCABULARY)
            digest = extend(digest, self.tokens[-1])
            self.digests.append(digest)

    @property
    def surely_ends(self) -> bool:
        """Whether what is in flight gives it all the tokens that it may have."""
        num_promised = sum(row.sample for row in self.in_flight)
        return self.num_known - len(self.prompt) + num_promised >= self.max_tokens


class Choice(NamedTuple):
    num_draft: tuple[int, ...]
    write_context: bool


class MoodyPolicy:
    """Drafts as many tokens as it likes, and writes the draft's context in spells."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._writes = True

    def choose(self, candidates: Sequence, other_tokens: int) -> Choice:
        assert candidates and other_tokens >= 0
        assert all(each.most == 0 or each.missing_context == 0 for each in candidates)
        if self._rng.random() < 0.1:
            self._writes = not self._writes
        return Choice(tuple(self._rng.randint(0, each.most) for each in candidates), self._writes)

    def worth_rebuilding(self, candidate, remaining_tokens: int) -> bool:
        assert candidate.missing_context >= 1 and remaining_tokens >= 0
        return self._rng.random() < 0.5
