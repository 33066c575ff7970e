"""Compiling grammars: what is refused and why, and that each is compiled once."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from dflash_engine import grammars as grammars_module
from dflash_engine.errors import BadSampling
from dflash_engine.grammar import Grammar
from dflash_engine.grammar_text import GrammarText
from dflash_engine.grammars import MAX_KEPT, Grammars
from dflash_engine.random_weights import NoTokenizer
from dflash_engine.tokenizer import Tokenizer
from tests.helpers import byte_level_tokenizer

VOCAB = 320


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, [2])


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(a", "regex: .*unclosed group"),
        ("regex", "a{2", "unclosed counted repetition"),
        ("regex", "(?=a)b", "look-around.* not supported"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("json_schema", {"type": "nonsense"}, "json_schema: Invalid type: nonsense"),
        ("json_schema", {"type": "object", "properties": {"a": 5}}, "schema must be an object or boolean"),
        ("json_schema", {"type": "string", "enum": []}, "Unsatisfiable schema"),
        ("json_schema", {"$ref": "#/$defs/x"}, "'/\\$defs/x' does not exist"),
        ("json_schema", {"$ref": "http://example.com/x"}, "does not fetch resources"),
        ("json_schema", {"$ref": "#"}, "no text agrees with it"),
        ("json_schema", {"not": {"type": "integer"}}, 'Unimplemented keys: \\["not"\\]'),
        ("json_schema", {"type": "array", "uniqueItems": True}, "Unimplemented keys.*uniqueItems"),
        ("json_schema", {"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
        ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason_in_one_line(kind, text, reason, grammars: Grammars):
    wanted = GrammarText(kind, text if isinstance(text, str) else json.dumps(text))
    for _ in range(2):
        with pytest.raises(BadSampling, match=reason) as caught:
            grammars.compile(wanted)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_deep_nesting_is_refused(grammars: Grammars):
    schema: dict[str, object] = {"type": "null"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    for text in (GrammarText("json_schema", json.dumps(schema)), GrammarText("regex", "(" * 9000)):
        with pytest.raises(BadSampling):
            grammars.compile(text)


def test_equal_texts_are_compiled_once_whoever_asks(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    made: list[GrammarText] = []
    compiled = grammars_module._compiled

    def count(text: GrammarText, *rest) -> Grammar | str:
        made.append(text)
        return compiled(text, *rest)

    monkeypatch.setattr(grammars_module, "_compiled", count)
    texts = [GrammarText("regex", letter) for letter in "abc" * 20]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(grammars.compile, texts))
    assert sorted(made) == sorted(set(texts))
    assert len({id(grammar) for grammar in found}) == 3


def test_the_grammars_that_were_asked_for_last_are_kept(grammars: Grammars):
    first, other = (grammars.compile(GrammarText("regex", text)) for text in "ab")
    for number in range(MAX_KEPT - 1):
        assert grammars.compile(GrammarText("regex", "a")) is first
        grammars.compile(GrammarText("regex", f"x{number}"))
    assert grammars.compile(GrammarText("regex", "a")) is first
    assert grammars.compile(GrammarText("regex", "b")) is not other


def test_without_the_library_the_reason_says_what_to_install(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BadSampling, match="pip install llguidance"):
        grammars.compile(GrammarText("regex", "a"))


def test_a_model_without_end_token_or_tokenizer_is_refused(tokenizer: Tokenizer):
    with pytest.raises(BadSampling, match="names none"):
        Grammars(tokenizer, VOCAB, ()).compile(GrammarText("regex", "a"))
    with pytest.raises(BadSampling, match="random weights"):
        Grammars(NoTokenizer(), VOCAB, (2,)).compile(GrammarText("regex", "a"))


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    other = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    with pytest.raises(BadSampling, match="byte-level"):
        Grammars(other, 2, (1,)).compile(GrammarText("regex", "a"))
