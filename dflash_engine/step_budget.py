"""The query tokens of one step while it is planned: what is granted to whom, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """One sequence's part of the step."""

    num_tokens: int
    """Known tokens to feed."""
    num_draft: int = 0


class StepBudget:
    """Grants of the step being planned; together at most `num_tokens` query tokens.

    One token is kept for the sequence `kept_for` until it has a grant.
    """

    def __init__(self, num_tokens: int, kept_for: int | None) -> None:
        self.grants: dict[int, Grant] = {}
        self._left = num_tokens
        self._kept_for = kept_for

    def left(self, seq_id: int | None = None) -> int:
        """Query tokens that this sequence may still get, or those that anyone may."""
        kept = self._kept_for is not None and self._kept_for not in self.grants
        return self._left - (kept and seq_id != self._kept_for)

    def grant(self, seq_id: int, num_tokens: int, num_draft: int = 0) -> None:
        assert seq_id not in self.grants and 1 <= num_tokens + num_draft <= self.left(seq_id), seq_id
        self.grants[seq_id] = Grant(num_tokens, num_draft)
        self._left -= num_tokens + num_draft

    def grant_draft(self, seq_id: int, num_draft: int) -> None:
        """Adds drafted tokens to a sequence whose anchor is granted."""
        assert num_draft <= self.left(seq_id), seq_id
        self.grants[seq_id] = Grant(self.grants[seq_id].num_tokens, num_draft)
        self._left -= num_draft

    def revoke(self, seq_id: int) -> None:
        """Takes back what a sequence was granted, if anything."""
        grant = self.grants.pop(seq_id, None)
        if grant is not None:
            self._left += grant.num_tokens + grant.num_draft


def share_evenly(wants: Sequence[int], num: int) -> list[int]:
    """Shares of `num`, none above its want, as equal as they can be; the first ones get the rest."""
    if sum(wants) <= num:
        return list(wants)
    shares = [0] * len(wants)
    for level in range(max(wants)):
        for index, want in enumerate(wants):
            if num and want > level:
                shares[index] += 1
                num -= 1
    return shares
