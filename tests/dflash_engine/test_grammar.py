"""Masks against a brute-force matcher, and their independence of how a state was reached."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import llguidance
import pytest
import regex

from dflash_engine.grammar import GrammarState
from dflash_engine.grammar_text import GrammarText
from dflash_engine.grammars import Grammars
from dflash_engine.tokenizer import Tokenizer
from tests.helpers import SPECIAL_TOKENS, byte_level_tokenizer

VOCAB, END = 320, 2
PATTERNS = (
    "the (order|orders|jacket), [0-9]{2,4}!?",
    "(a|ab|abc|bcd)*d?",
    "[a-e ]{0,12}(you|your)?",
    "Where is my order\\?",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "stars": {"type": "integer", "minimum": 1, "maximum": 15},
        "tags": {"type": "array", "items": {"enum": ["red", "reddish", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "stars", "tags"],
    "additionalProperties": False,
}
NEVER = {"$ref": "#/$defs/never"}
"""Nothing can be of it, which is not seen before it is tried."""


class Bytes:
    """A vocabulary of just these texts, for what the tokenizers of the tests do not show."""

    def __init__(self, *texts: bytes) -> None:
        self.texts = texts

    def token_bytes(self, num_tokens: int) -> list[bytes]:
        return [*self.texts, *[b""] * (num_tokens - len(self.texts))]

    def encode_plain(self, text: str) -> list[int]:
        known = [self.texts.index(byte) for byte in map(bytes, zip(text.encode())) if byte in self.texts]
        return known if len(known) == len(text.encode()) else []


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, [END])


def ids(state: GrammarState, drafted: Sequence[int] = ()) -> list[int]:
    """Allowed tokens; every mask has the model's size."""
    mask = state.allowed(drafted)
    assert mask.shape == (VOCAB,)
    return mask.nonzero().flatten().tolist()


def brute_force(pattern: str, texts: Sequence[bytes], text: bytes) -> set[int]:
    """Every token that leaves the text the beginning of one that the pattern matches, tried one by one."""
    compiled = regex.compile(pattern.encode())
    found = {
        token
        for token, piece in enumerate(texts)
        if piece and compiled.fullmatch(text + piece, partial=True) is not None
    }
    return found | ({END} if compiled.fullmatch(text) else set())


def is_chain(pieces: Sequence[bytes]) -> bool:
    """Whether one text can come next: each piece is a beginning of the longest."""
    longest = max(pieces, key=len)
    return all(longest.startswith(piece) for piece in pieces)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_those_of_trying_every_token(pattern: str, grammars: Grammars, tokenizer: Tokenizer):
    texts = tokenizer.token_bytes(VOCAB)
    grammar, noise = grammars.compile(GrammarText("regex", pattern)), random.Random(pattern)
    num_compared = num_forced = 0
    for _ in range(25):
        state = grammar.start()
        output: list[int] = []
        while END not in output and len(output) < 20:
            state.commit(output)
            allowed = ids(state)
            wanted = brute_force(pattern, texts, b"".join(texts[token] for token in output))
            if set(allowed) == wanted:
                num_compared += 1
            else:
                # Where only one text can follow, one way of cutting it is left of several.
                assert len(allowed) == 1 and wanted.issuperset(allowed), output
                assert is_chain([texts[token] for token in wanted]), output
                num_forced += 1
            output.append(noise.choice(allowed))
    assert num_compared > 25 and num_forced + num_compared > 50


def test_forced_text_is_cut_as_the_tokenizer_cuts_it(grammars: Grammars, tokenizer: Tokenizer):
    text = "Where is my order? The order was sent on Monday"
    state = grammars.compile(GrammarText("regex", regex.escape(text))).start()
    output: list[int] = []
    while END not in output:
        state.commit(output)
        output += ids(state)[:1]
    assert output[:-1] == tokenizer.encode_plain(text)


@pytest.mark.parametrize(
    "text",
    [
        *(GrammarText("regex", pattern) for pattern in PATTERNS),
        GrammarText("json_schema", json.dumps(SCHEMA)),
    ],
    ids=[*PATTERNS, "schema"],
)
def test_a_mask_depends_on_the_tokens_before_it_alone(text: GrammarText, grammars: Grammars):
    """Whatever was drafted and taken back, and however many tokens were committed at once."""
    grammar, noise = grammars.compile(text), random.Random(1)
    for _ in range(15):
        state = grammar.start()
        output: list[int] = []
        while END not in output and len(output) < 30:
            for _ in range(noise.randrange(3)):
                drafted: list[int] = []
                for _ in range(noise.randrange(8)):
                    drafted.append(noise.choice(ids(state, drafted)))
            fresh = grammar.start()
            fresh.commit(output)
            assert ids(state) == ids(fresh), output
            for _ in range(noise.randrange(1, 4)):
                output.append(noise.choice(ids(fresh, output[len(fresh._committed) :])))
                if output[-1] == END:
                    break
            if END not in output:
                state.commit(output)


@pytest.mark.parametrize("pattern", ["[^a]*", ".*", "<.im_end.>"])
def test_special_tokens_and_ids_without_text_are_never_allowed(
    pattern: str, grammars: Grammars, tokenizer: Tokenizer
):
    without = {token for token, text in enumerate(tokenizer.token_bytes(VOCAB)) if not text}
    assert set(range(len(SPECIAL_TOKENS))) < without and set(range(304, VOCAB)) < without
    state = grammars.compile(GrammarText("regex", pattern)).start()
    drafted: list[int] = []
    for token in tokenizer.encode_plain("<"):
        assert without.intersection(ids(state, drafted)) <= {END}
        drafted.append(token)
    assert without.intersection(ids(state, drafted)) <= {END}
    assert (END in ids(state)) == (pattern != "<.im_end.>")


def test_behind_an_end_that_was_drafted_comes_the_end(grammars: Grammars, tokenizer: Tokenizer):
    state = grammars.compile(GrammarText("regex", "a?")).start()
    (letter,) = tokenizer.encode_plain("a")
    assert ids(state) == sorted([letter, END])
    assert ids(state, [END]) == ids(state, [END, letter]) == [END]
    assert ids(state, [letter]) == [END]
    assert ids(state) == sorted([letter, END])


def test_an_answer_that_cannot_go_on_ends_and_a_guess_that_cannot_does_no_harm(
    grammars: Grammars, tokenizer: Tokenizer
):
    schema = {"type": "object", "properties": {"a": NEVER, "b": {"type": "null"}}, "$defs": {"never": NEVER}}
    text = GrammarText("json_schema", json.dumps({**schema, "additionalProperties": False}))
    state, into = grammars.compile(text).start(), [tokenizer.encode_plain(letter)[0] for letter in '{"a": ']
    for length in range(len(into)):
        assert ids(state, into[:length]) != [END]
    assert ids(state, into) == [END]
    fresh = grammars.compile(text).start()
    assert ids(state) == ids(fresh)
    assert ids(state, into[:1]) == ids(fresh, into[:1])
    fresh.commit(into)
    assert ids(fresh) == [END]


def test_a_limit_that_one_answer_reaches_is_none_for_others_nor_for_itself_behind_other_guesses(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    limits = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **given: limits(**given, max_lexer_states=60))
    grammar = Grammars(tokenizer, VOCAB, [END]).compile(GrammarText("regex", "c+|[ab]*a[ab]{14}c"))
    fresh, noise = grammar.start(), random.Random(0)
    a, b, c = (tokenizer.encode_plain(letter)[0] for letter in "abc")
    first, second = ids(fresh), ids(fresh, [c])
    assert len(first) > 3 and END in second and len(second) > 1
    state = grammar.start()
    guesses: list[int] = []
    while ids(state, guesses) != [END]:
        guesses.append(noise.choice([a, b]))
    assert 15 < len(guesses) < 60
    other = grammar.start()
    for answer in (state, other, fresh):
        assert ids(answer) == first and ids(answer, [c]) == second
    other.commit([c])
    assert ids(other) == second


def test_a_byte_that_no_token_begins_with_ends_the_answer():
    state = Grammars(Bytes(b"", b"a", b"b"), VOCAB, [0]).compile(GrammarText("regex", "a(b|ac)b?")).start()
    assert ids(state, []) == [1]
    assert ids(state, [1]) == [1, 2]
    assert ids(state, [1, 1]) == [0]
    assert ids(state, [1]) == [1, 2]


def test_ids_with_the_same_text_are_all_allowed():
    state = Grammars(Bytes(b"", b"a", b"b", b"a"), VOCAB, [0]).compile(GrammarText("regex", "[ab]+")).start()
    assert ids(state) == [1, 2, 3]


def test_each_of_several_end_tokens_ends():
    state = Grammars(Bytes(b"", b"a", b""), VOCAB, [0, 2]).compile(GrammarText("regex", "a?")).start()
    assert ids(state) == [0, 1, 2]
    assert ids(state, [1]) == [0, 2]
