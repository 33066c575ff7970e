"""What an answer may say: a JSON schema or a regular expression, as masks over the vocabulary.

A token is allowed where the text so far and the token begin some text of the grammar; where only one text
can come next, it is allowed in the tokenizer's own cut alone. An end token is allowed where the text is
whole, and alone where nothing can follow. Special tokens and ids without text are never allowed. So a mask is
a function of the grammar and of the tokens before it, whether these are committed or only drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher


NO_WAY_ON = "NoExtensionBias"
"""llguidance's reason to stop where no token fits the grammar."""


@dataclass(frozen=True, slots=True)
class Alphabet:
    """What answers are made of."""

    vocab_size: int
    """Of the model, which may have more ids than the tokenizer."""
    end_tokens: frozenset[int]
    first_bytes: frozenset[int]
    """With which a token begins. Real tokenizers lack some control characters."""


class Grammar:
    """A compiled grammar, from which any number of answers start.

    Copies of its matcher share what the lexer has learned, which has a limit; `build` makes one that shares
    nothing.
    """

    def __init__(self, matcher: LLMatcher, alphabet: Alphabet, build: Callable[[], LLMatcher]) -> None:
        self._matcher = matcher
        self._alphabet = alphabet
        self._build = build

    def start(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._alphabet, self._build)


class GrammarState:
    """How far one answer is in its grammar.

        committed tokens | walked: drafted tokens that were looked at
                         ^ rolled back to here when others are drafted, or committed

    It moves on for good with committed tokens only.
    """

    def __init__(self, matcher: LLMatcher, alphabet: Alphabet, build: Callable[[], LLMatcher]) -> None:
        self._matcher = matcher
        self._alphabet = alphabet
        self._build = build
        self._committed: list[int] = []
        self._walked: list[int] = []
        # Of the states before each walked token and behind the last, as far as they were asked for.
        self._masks: list[bytes] = []

    def commit(self, output: Sequence[int]) -> None:
        """Takes all committed tokens of the answer, of which those before may be known already."""
        new = output[len(self._committed) :]
        if not new:
            return
        self._walk(new)
        self._committed += new
        self._walked, self._masks = [], self._masks[len(new) :]

    def allowed(self, drafted: Sequence[int] = ()) -> Tensor:
        """bool [V] on the CPU: what may follow the committed tokens and these allowed ones.

        Behind an end token, and where there is no way on in the grammar, the vocabulary or the library's
        limits, this is the end alone.
        """
        depth = len(drafted)
        if self._alphabet.end_tokens.isdisjoint(drafted):
            if len(self._masks) <= depth or self._walked[:depth] != list(drafted):
                self._walk(drafted)
                assert len(self._masks) == depth, "states are looked at one after the other"
                self._masks.append(self._compute())
            bits = np.unpackbits(np.frombuffer(self._masks[depth], dtype=np.uint8), bitorder="little")
            if bits.any():
                return torch.from_numpy(bits[: self._alphabet.vocab_size]).bool()
        mask = torch.zeros(self._alphabet.vocab_size, dtype=torch.bool)
        mask[list(self._alphabet.end_tokens)] = True
        return mask

    def _compute(self) -> bytes:
        """A bit for each token; none where there is no way on."""
        # Asked for a byte that no token begins with, the library gives tokens that do not fit.
        forced: bytes = self._matcher.compute_ff_bytes()
        if forced and forced[0] not in self._alphabet.first_bytes:
            return b""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() and self._matcher.stop_reason() != NO_WAY_ON:
            # A limit was reached, perhaps by other answers or guesses: it counts only if it is reached again.
            self._matcher = self._build()
            self._matcher.consume_tokens([*self._committed, *self._walked])
            mask = self._matcher.compute_bitmask()
        return mask

    def _walk(self, tokens: Sequence[int]) -> None:
        """Goes to the state behind the committed tokens and these."""
        common = _num_common(self._walked, tokens)
        back = len(self._walked) - common
        if back:
            self._matcher.rollback(back)  # not from behind a limit: then the next mask is an error again
        del self._walked[common:], self._masks[common + 1 :]
        if common < len(tokens):
            self._matcher.consume_tokens(list(tokens[common:]))
            self._walked += tokens[common:]


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
