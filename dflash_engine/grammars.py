"""Compiles grammars for one model's tokenizer, and keeps the states of its answers.

llguidance parses. It refuses keywords that it cannot keep instead of ignoring them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from importlib import metadata
from typing import TYPE_CHECKING, Protocol

from dflash_engine.errors import BadSampling
from dflash_engine.grammar import Alphabet, Grammar, GrammarState
from dflash_engine.grammar_text import GrammarText

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_KEPT = 256
"""Compiled grammars that are kept for later requests; a small schema takes about 50 kB."""
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
"""JSON on one line, as `json.dumps` writes it: small models can go on with white space for ever."""


class Vocabulary(Protocol):
    """What of a tokenizer decides the masks."""

    def token_bytes(self, num_tokens: int) -> list[bytes]:
        """The text of each id below `num_tokens`, none for special tokens. Raises `BadSampling`."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is special."""
        ...


def grammar_version() -> str:
    """The installed llguidance's version, or an empty text."""
    try:
        return metadata.version("llguidance")
    except metadata.PackageNotFoundError:
        return ""


class Grammars:
    """Compiles each distinct grammar once for one tokenizer, and keeps the states of answers.

    `compile` may be called from any thread, all else from the one that steps.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """vocab_size: as in `Alphabet`; end_tokens: of the model and its tokenizer."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._end_tokens = frozenset(end_tokens)
        self._lock = threading.Lock()
        self._tokenizer: tuple[LLTokenizer, Alphabet] | None = None
        # A grammar, or why there is none.
        self._compiled: OrderedDict[GrammarText, Future[Grammar | str]] = OrderedDict()
        self._states: dict[int, GrammarState] = {}

    def compile(self, text: GrammarText) -> Grammar:
        """Raises `BadSampling` with the reason. Waits for another thread that compiles the same."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build_tokenizer()
            future = self._compiled.get(text)
            mine = future is None
            if future is None:
                future = self._compiled[text] = Future()
                if len(self._compiled) > MAX_KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(text)
        if mine:
            try:
                future.set_result(_compiled(text, *self._tokenizer))
            except BaseException as error:
                future.set_exception(error)
                self._compiled.pop(text, None)
                raise
        compiled = future.result()
        if isinstance(compiled, str):
            raise BadSampling(f"{text.kind}: {compiled}")
        return compiled

    def begin(self, seq_id: int, grammar: Grammar) -> None:
        self._states[seq_id] = grammar.start()

    def end(self, seq_id: int) -> None:
        """Forgets an answer, whether it had a grammar or not."""
        self._states.pop(seq_id, None)

    def state(self, seq_id: int, output: Sequence[int]) -> GrammarState:
        """The state of an answer with these committed tokens."""
        state = self._states[seq_id]
        state.commit(output)
        return state

    def _build_tokenizer(self) -> tuple[LLTokenizer, Alphabet]:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper  # native code, which few requests need
        except ImportError as error:
            raise BadSampling(
                "json_schema and regex need the package llguidance, which cannot be imported here: "
                f"pip install llguidance ({error})"
            ) from error
        if not self._end_tokens:
            raise BadSampling("json_schema and regex need a model with an end token; this one names none")
        texts = self._vocabulary.token_bytes(self._vocab_size)
        ends = sorted(self._end_tokens)
        wrapped = TokenizerWrapper(_Texts(texts, self._vocabulary, ends[0]))
        first_bytes = frozenset(text[0] for text in texts if text)
        return (
            LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=ends),
            Alphabet(self._vocab_size, self._end_tokens, first_bytes),
        )


class _Texts:
    """A vocabulary in the form that llguidance asks for."""

    bos_token_id = None

    def __init__(self, texts: list[bytes], vocabulary: Vocabulary, end_token: int) -> None:
        self.tokens = texts
        self.special_token_ids = [token for token, text in enumerate(texts) if not text]
        self.eos_token_id = end_token
        self._encode = vocabulary.encode_plain

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _compiled(text: GrammarText, tokenizer: LLTokenizer, alphabet: Alphabet) -> Grammar | str:
    """A grammar, or why there is none."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        if text.kind == "json_schema":
            source = LLMatcher.grammar_from_json_schema(text.text, overrides=JSON_OPTIONS)
        else:
            source = LLMatcher.grammar_from_regex(text.text)
    except ValueError as error:
        return str(error)

    def build() -> LLMatcher:
        return LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))

    matcher = build()
    if matcher.is_error():
        return _reason(matcher.get_error())
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        return "no text agrees with it"
    return Grammar(matcher, alphabet, build)


def _reason(message: str) -> str:
    """The library's message without the grammar that it was given, on one line."""
    words = " ".join(message.split("<state>")[0].split("\n   1 |")[0].split())
    return words if len(words) <= 300 else f"{words[:297]}..."
