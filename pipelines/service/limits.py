"""Requests and tokens a minute, for each owner of keys."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipelines.service.errors import ApiError
from pipelines.service.keys import Owner

MINUTE_S = 60.0


class Allowance:
    """So much a minute, saved up to one minute's worth; may be overdrawn, and is then paid back."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until so much is there; 0 where it is."""
        self._refill(now_s)
        return max(0.0, (amount - self._left) / self._per_minute * MINUTE_S)

    def take(self, amount: float, now_s: float) -> None:
        self._refill(now_s)
        self._left -= amount

    def _refill(self, now_s: float) -> None:
        gained = (now_s - self._at_s) * self._per_minute / MINUTE_S
        self._left = min(float(self._per_minute), self._left + gained)
        self._at_s = now_s


class Limits:
    """What every owner has left. One process counts for itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowances: dict[tuple[str, str], Allowance] = {}

    def admit(self, owner: Owner) -> None:
        """Takes one request. Raises `ApiError` 429 with the time to wait, and takes nothing then.

        Tokens are paid when they are known: a request comes in while any are left, so that a long one is
        never refused for ever.
        """
        now_s = self._clock()
        for kind, needed in (("requests", 1.0), ("tokens", 1e-9)):
            allowance = self._allowance(owner, kind)
            wait_s = allowance.wait_s(needed, now_s) if allowance else 0.0
            if allowance and wait_s > 0:
                raise ApiError(
                    429,
                    f"{owner.name} has used up its {kind} for this minute; try again in {wait_s:.0f} s",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        requests = self._allowance(owner, "requests")
        if requests is not None:
            requests.take(1, now_s)

    def pay_tokens(self, owner: Owner, num_tokens: int) -> None:
        allowance = self._allowance(owner, "tokens")
        if allowance is not None:
            allowance.take(num_tokens, self._clock())

    def _allowance(self, owner: Owner, kind: str) -> Allowance | None:
        per_minute = owner.requests_per_minute if kind == "requests" else owner.tokens_per_minute
        if per_minute is None:
            return None
        key = (owner.name, kind)
        if key not in self._allowances:
            self._allowances[key] = Allowance(per_minute, self._clock())
        return self._allowances[key]
