"""Where an answer ends: stop tokens, stop strings and max_tokens, looked for token by token.

Only committed tokens are looked at, in order, so the answer is the same however many come at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_engine.request import FinishReason, SamplingParams


class TextStream(Protocol):
    """Incremental detokeniser: gives text as soon as its characters are whole."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str:
        """What was held back for a character that never became whole."""
        ...


@dataclass(frozen=True, slots=True)
class Accepted:
    """What came of some committed tokens."""

    kept: int
    """Tokens that belong to the answer; the ones behind them do not."""
    text: str
    """Text that can be shown now."""
    finish: FinishReason | None = None


class StopWatcher:
    """Turns one sequence's committed tokens into text until the answer ends."""

    def __init__(
        self,
        stream: TextStream,
        sampling: SamplingParams,
        eos_token_ids: Collection[int],
        max_tokens: int,
    ) -> None:
        assert max_tokens >= 1, max_tokens
        self._stream = stream
        self._stops = sampling.stop
        eos = () if sampling.ignore_eos else eos_token_ids
        self._stop_tokens = frozenset((*sampling.stop_token_ids, *eos))
        self._left = max_tokens
        # Text not shown yet, because it may be the beginning of a stop string.
        self._held = ""

    def accept(self, tokens: Sequence[int]) -> Accepted:
        """Takes newly committed tokens; not to be called again once one call gave a `finish`.

        A stop token is kept as a token and has no text. The token that completes a stop string is
        kept, and the text is cut before the stop string; of several, the one that begins first counts.
        """
        text = ""
        for kept, token in enumerate(tokens, start=1):
            assert self._left > 0, "the answer has ended"
            self._left -= 1
            is_stop = token in self._stop_tokens
            shown, found = self._release("" if is_stop else self._stream.push(token))
            text += shown
            if found or is_stop or self._left == 0:
                self._left = 0
                if not found:
                    shown, found = self._release(self._stream.flush(), last=True)
                    text += shown
                return Accepted(kept, text, "stop" if found or is_stop else "length")
        return Accepted(len(tokens), text)

    def _release(self, piece: str, *, last: bool = False) -> tuple[str, bool]:
        """Text to be shown now that `piece` has come, and whether a stop string was found."""
        self._held += piece
        found = min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=-1)
        end = found if found >= 0 else len(self._held) - (0 if last else self._num_undecided())
        shown, self._held = self._held[:end], self._held[end:]
        return shown, found >= 0

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text with which a stop string could begin."""
        ends = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(self._held)), 0, -1)
            if self._held.endswith(stop[:length])
        )
        return max(ends, default=0)
