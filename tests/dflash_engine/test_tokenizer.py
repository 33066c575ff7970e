"""Chats to tokens, and tokens to text that never shows half a character."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from dflash_engine.catalog import resolve_model
from dflash_engine.errors import BadPrompt, ConfigError
from dflash_engine.request import Message
from dflash_engine.tokenizer import LONGEST_WAIT, REPLACEMENT, Detokenizer, Tokenizer, byte_of_letter
from tests.helpers import TOKENIZER_SIZE, byte_level_tokenizer, tiny_model_folder

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
TEXTS = (
    "Where is my order?",
    "我的订单在哪里？您的订单已经发货。",
    f"thumbs 👍🏽, flag 🇨🇳, family {FAMILY}, done",
    "Zażółć gęślą jaźń, हिन्दी, 한국어, עברית",
    "  two spaces, a tab\t and\n\nlines\r\n",
    "e\u0301 combining",
    "",
)


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer(byte_level_tokenizer())


@pytest.fixture(scope="module")
def added():
    """The same with tokens added that stand for themselves, also where their letters stand for bytes."""
    fast = byte_level_tokenizer()
    special = [AddedToken("<|tool|>", special=True), AddedToken("é你", special=True)]
    plain = ["<think>", "Ġé", "é ", "你", "a\u0100b", "\xad", "\U0001f642"]
    fast.backend_tokenizer.add_tokens([*special, *(AddedToken(text, special=False) for text in plain)])
    return Tokenizer(fast)


@pytest.fixture(scope="module")
def embedded():
    return Tokenizer.load(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def byte_fallback():
    """The decoder of SentencePiece models: words with a leading space, unknown text as bytes."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        "▁order",
        "▁my",
        "er",
        "▁",
        "你",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def fallback_tokens(text):
    return [3 + byte for byte in text.encode()]


def stream(tokenizer, tokens):
    decoder = tokenizer.stream()
    pieces = [decoder.push(token) for token in tokens]
    return pieces, decoder.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_make_the_text(byte_level, text):
    tokens = byte_level.encode(text)
    pieces, rest = stream(byte_level, tokens)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert rest == ""
    assert "".join(pieces) == byte_level.decode(tokens) == text


@given(text=st.text(alphabet=st.characters(exclude_characters=[REPLACEMENT], exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_out_of_the_stream_as_it_went_in(byte_level, text):
    pieces, rest = stream(byte_level, byte_level.encode(text))
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + rest == byte_level.decode(byte_level.encode(text))


def in_blocks(decoder, tokens, sizes):
    """All text of a stream that is given its tokens in blocks of these sizes, and then one by one."""
    text, position = "", 0
    for size in sizes:
        text += decoder.push_all(tokens[position : position + size])
        position += size
    return text + "".join(decoder.push(token) for token in tokens[position:]) + decoder.flush()


@given(tokens=st.lists(st.integers(0, TOKENIZER_SIZE + 20)), sizes=st.lists(st.integers(0, 9)))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tokens_of_a_byte_level_model_stream_to_their_decoding(added, tokens, sizes):
    assert in_blocks(added.stream(), tokens, sizes) == added.decode(tokens)


@given(raw=st.binary(), sizes=st.lists(st.integers(0, 5)))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_of_a_byte_level_model_stream_to_their_decoding(byte_level, raw, sizes):
    backend = byte_level_tokenizer().backend_tokenizer
    letters = {byte: letter for letter, byte in byte_of_letter().items()}
    tokens = [backend.token_to_id(letters[byte]) for byte in raw]
    assert in_blocks(byte_level.stream(), tokens, sizes) == byte_level.decode(tokens)


def test_the_letters_of_bytes_are_those_of_byte_level_tokenizers():
    byte_of, decoder = byte_of_letter(), decoders.ByteLevel()
    assert sorted(byte_of) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_of.values()) == list(range(256))
    for letter, byte in byte_of.items():
        assert decoder.decode([letter]) == bytes([byte]).decode(errors="replace")
    whole = "".join(chr(point) for point in range(0x80, 0x800))
    letters = {byte: letter for letter, byte in byte_of.items()}
    assert decoder.decode([letters[byte] for byte in whole.encode()]) == whole


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_the_embedded_model_stream_to_their_decoding(embedded, seed):
    rng = random.Random(seed)
    tokens = rng.choices(range(embedded.vocab_size + 50), k=150) + rng.choices(range(300), k=50)
    rng.shuffle(tokens)
    sizes = [rng.randint(1, 8) for _ in range(40)]
    assert in_blocks(embedded.stream(), tokens, sizes) == embedded.decode(tokens)


def test_each_token_of_the_embedded_model_alone_streams_to_its_decoding(embedded):
    for token in range(embedded.vocab_size + 5):
        assert in_blocks(embedded.stream(), [token], [1]) == embedded.decode([token])


@given(tokens=st.lists(st.integers(0, TOKENIZER_SIZE + 20)))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_stream_for_any_decoder_gives_the_decoding_of_a_byte_level_model_too(byte_level, tokens):
    backend = byte_level_tokenizer().backend_tokenizer
    whole = byte_level.decode(tokens)
    if REPLACEMENT * LONGEST_WAIT not in whole:
        assert in_blocks(Detokenizer(backend, frozenset({0, 1, 2})), tokens, [3, 4]) == whole


@given(
    text=st.text(alphabet=st.characters(exclude_characters=[REPLACEMENT, "\0"], exclude_categories=["Cs"]))
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_in_single_bytes_of_a_byte_fallback_model_streams_to_its_decoding(byte_fallback, text):
    tokens = fallback_tokens(text)
    pieces, rest = stream(byte_fallback, tokens)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + rest == byte_fallback.decode(tokens)


def test_text_is_shown_as_soon_as_it_is_certain(byte_level):
    decoder = byte_level.stream()
    one, two, three = byte_level.encode("你")
    assert [decoder.push(token) for token in (one, two, three)] == ["", "", "你"]
    (letter,) = byte_level.encode("a")
    assert decoder.push(letter) == "a"


def test_words_of_a_byte_fallback_model_keep_their_spaces(byte_fallback):
    order, my, er, space, ni = range(259, 264)
    tokens = [my, order, er, space, space, *fallback_tokens("好👍"), my, ni, er]
    pieces, rest = stream(byte_fallback, tokens)
    assert "".join(pieces) + rest == byte_fallback.decode(tokens) == "my orderer  好👍 my你er"
    assert pieces[:3] == ["my", " order", "er"]


def test_text_goes_on_after_an_invalid_byte(byte_level, byte_fallback):
    broken = byte_level.encode("你")[:1]
    pieces, rest = stream(byte_level, [*byte_level.encode("a"), *broken, *byte_level.encode("order")])
    assert "".join(pieces) + rest == f"a{REPLACEMENT}order"
    assert "order".startswith(pieces[2].removeprefix(REPLACEMENT))
    pieces, rest = stream(byte_fallback, [*fallback_tokens("你")[:1], 260, 259])
    assert "".join(pieces) + rest == f"{REPLACEMENT} my order"


def test_bytes_that_are_never_a_character_are_not_held_for_ever(byte_level):
    (broken, *_) = byte_level.encode("你")
    pieces, rest = stream(byte_level, [broken] * 100)
    assert pieces == ["", *[REPLACEMENT] * 99] and rest == REPLACEMENT
    decoder = Detokenizer(byte_level_tokenizer().backend_tokenizer, frozenset())
    held, pieces = 0, [decoder.push(broken) for _ in range(100)]
    assert "".join(pieces) + decoder.flush() == REPLACEMENT * 100
    for piece in pieces:
        held = 0 if piece else held + 1
        assert held <= LONGEST_WAIT


def test_an_unfinished_character_comes_with_the_flush(byte_level):
    tokens = byte_level.encode("ab你")[:-1]
    pieces, rest = stream(byte_level, tokens)
    assert "".join(pieces) == "ab"
    assert rest == REPLACEMENT
    assert "".join(pieces) + rest == byte_level.decode(tokens)


def test_special_tokens_and_ids_without_text_give_none(byte_level):
    ni = byte_level.encode("你")
    tokens = [1, ni[0], 2, TOKENIZER_SIZE + 5, *ni[1:], 0]
    pieces, rest = stream(byte_level, tokens)
    assert "".join(pieces) + rest == byte_level.decode(tokens) == "你"


class CountingBackend:
    """A tokenizer that notes how many tokens each call decodes."""

    def __init__(self, backend):
        self.id_to_token = backend.id_to_token
        self.decoded = []
        self._backend = backend

    def decode(self, tokens, skip_special_tokens):
        self.decoded.append(len(tokens))
        return self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)


def test_the_cost_of_a_token_does_not_grow_with_the_answer():
    backend: Any = CountingBackend(byte_level_tokenizer().backend_tokenizer)
    decoder = Detokenizer(backend, frozenset())
    broken = backend._backend.encode("你").ids[0]
    for token in backend._backend.encode("我的 order ").ids * 200 + [broken] * 2000:
        decoder.push(token)
    assert max(backend.decoded) <= 2 * (LONGEST_WAIT + 1)


def test_a_chat_goes_through_the_template(byte_level):
    tokens = byte_level.encode_chat([Message("system", "Be kind."), Message("user", "你好")])
    text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n"
    assert tokens == byte_level.encode(text)


def test_the_template_writes_the_bos_and_nothing_adds_another(tmp_path):
    from tokenizers.processors import TemplateProcessing

    fast = byte_level_tokenizer()
    fast.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer = Tokenizer(fast)
    assert tokenizer.encode("Hi")[0] == 1
    assert tokenizer.encode_chat([Message("user", "Hi")])[:2] != [1, 1]


def test_a_model_without_a_chat_template_says_the_way_out():
    tokenizer = Tokenizer(byte_level_tokenizer(chat_template=None))
    with pytest.raises(BadPrompt, match="no chat template; give the prompt as text"):
        tokenizer.encode_chat([Message("user", "Hi")])
    assert tokenizer.decode(tokenizer.encode("Hi")) == "Hi"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content | nothing }}", "{{ 1 + 'a' }}"],
)
def test_a_template_that_refuses_the_messages_makes_a_bad_prompt(template):
    tokenizer = Tokenizer(byte_level_tokenizer(chat_template=template))
    with pytest.raises(BadPrompt, match="chat template refuses the messages: "):
        tokenizer.encode_chat([Message("user", "Hi")])


def test_half_a_surrogate_pair_is_a_bad_prompt(byte_level):
    with pytest.raises(BadPrompt, match="not valid Unicode"):
        byte_level.encode("a\ud83d")
    with pytest.raises(BadPrompt, match="not valid Unicode"):
        byte_level.encode_chat([Message("user", "a\ud83d")])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_saved_tokenizer_is_loaded(tmp_path, architecture, byte_level):
    tokenizer = Tokenizer.load(tiny_model_folder(tmp_path, architecture))
    assert tokenizer.vocab_size == TOKENIZER_SIZE
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode(tokenizer.encode("我的 order")) == "我的 order"


def test_truncation_that_was_saved_with_a_tokenizer_cuts_nothing():
    fast = byte_level_tokenizer()
    fast.backend_tokenizer.enable_truncation(4)
    assert len(Tokenizer(fast).encode("Where is my order? " * 20)) > 100


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer can be read from"):
        Tokenizer.load(tmp_path)
    folder = tiny_model_folder(tmp_path, "llama")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="no tokenizer can be read from"):
        Tokenizer.load(folder)
