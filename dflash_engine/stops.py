"""Where an answer ends: stop tokens, stop strings and max_tokens.

Only committed tokens are looked at, in order, so the answer is the same however many come at once. This
runs for every row of every step, so what most rows need is done for all their tokens at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from dflash_engine.request import FinishReason, SamplingParams


class TextStream(Protocol):
    """Incremental detokeniser: gives text as soon as its characters are whole."""

    def push(self, token: int) -> str:
        """The text that is certain now and has not been returned yet."""
        ...

    def push_all(self, tokens: Sequence[int]) -> str:
        """What `push` gives for these tokens, in one piece."""
        ...

    def flush(self) -> str:
        """What was held back for a character that never became whole."""
        ...


class Accepted(NamedTuple):
    """What came of some committed tokens."""

    kept: int
    """Tokens that belong to the answer; the ones behind them do not."""
    text: str
    """Text that can be shown now."""
    finish: FinishReason | None = None


class StopWatcher:
    """Turns one sequence's committed tokens into text until the answer ends."""

    __slots__ = ("_held", "_left", "_stop_tokens", "_stops", "_stream", "matched")

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
        self.matched: str | int | None = None
        """The stop string or stop token that ended the answer, if one did."""

    def accept(self, tokens: Sequence[int]) -> Accepted:
        """Takes newly committed tokens; not to be called again once one call gave a `finish`.

        A stop token is kept as a token and has no text. The token that completes a stop string is
        kept, and the text is cut before the stop string; of several, the one that begins first counts.
        """
        left, kept = self._left, len(tokens)
        finish: FinishReason | None = None
        assert left > 0, "the answer has ended"
        with_text = tokens
        if not self._stop_tokens.isdisjoint(tokens):
            before = next(at for at, token in enumerate(tokens) if token in self._stop_tokens)
            if before < left:
                kept, finish, with_text = before + 1, "stop", tokens[:before]
                self.matched = tokens[before]
        if finish is None and kept >= left:
            kept, finish, with_text = left, "length", tokens[:left]
        self._left = 0 if finish else left - kept
        if self._stops:
            return self._accept_text(with_text, kept, finish)
        text = self._stream.push_all(with_text)
        return Accepted(kept, text + self._stream.flush() if finish else text, finish)

    def flush(self) -> str:
        """Ends the answer from outside, and gives the text not shown yet, up to a stop string in it.

        There is none once the answer has ended by itself.
        """
        if not self._left:
            return ""
        text, self._held, self._left = self._held + self._stream.flush(), "", 0
        if (found := self._first_stop(text)) is None:
            return text
        end, self.matched = found
        return text[:end]

    def _accept_text(self, tokens: Sequence[int], kept: int, finish: FinishReason | None) -> Accepted:
        """Takes tokens that have text, looking for stop strings."""
        pieces = [self._stream.push(token) for token in tokens]
        if finish:
            pieces.append(self._stream.flush())
        text = self._held + "".join(pieces)
        undecided = 0
        for stop in self._stops:
            if stop[0] in text:  # seldom true, and quickly seen
                if stop in text:
                    return self._cut(pieces, kept)
                undecided = max(undecided, num_begun(stop, text))
        shown = len(text) if finish else len(text) - undecided
        self._held = text[shown:]
        return Accepted(kept, text[:shown], finish)

    def _cut(self, pieces: list[str], kept: int) -> Accepted:
        """The answer up to the first piece that completes a stop string, which there is."""
        text, self._held, self._left = self._held, "", 0
        for number, piece in enumerate(pieces, start=1):
            text += piece
            if (found := self._first_stop(text)) is not None:
                end, self.matched = found
                # The piece behind the tokens' is what the flush gave.
                return Accepted(min(number, kept), text[:end], "stop")
        raise AssertionError("no piece completes a stop string")

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string begins, if there is one, and the shortest that begins there."""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, key=lambda each: (each[0], len(each[1])), default=None)


def num_begun(stop: str, text: str) -> int:
    """Length of the longest end of the text with which the stop string begins but is not whole."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
