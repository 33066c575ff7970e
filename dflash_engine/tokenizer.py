"""Text to token ids and back, whole or as a stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dflash_engine.errors import BadPrompt, BadSampling, ConfigError
from dflash_engine.request import Message
from dflash_engine.stops import TextStream

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_WAIT = 16
"""Tokens after which a run of undecodable bytes is shown as it is; a code point has four at most."""


class Tokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        from tokenizers.decoders import ByteLevel  # native code, which nobody else here needs

        self._fast = fast
        # The backend itself, without truncation and padding, has no state that a call changes.
        self._backend: tokenizers.Tokenizer = fast.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token for token, each in added.items() if each.special)
        self._token_bytes: TokenBytes | None = None
        if isinstance(self._backend.decoder, ByteLevel):
            # A special token is one by its name, whatever other id has the same.
            names = frozenset(each.content for each in added.values() if each.special)
            self._token_bytes = TokenBytes(self._backend, names)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the tokenizer files of a model folder. Raises `ConfigError`."""
        from transformers import AutoTokenizer  # seconds of import, which nobody else here needs

        try:
            fast: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError, json.JSONDecodeError) as error:
            raise ConfigError(f"no tokenizer can be read from {folder}: {_first_line(error)}") from error
        if not fast.is_fast:
            raise ConfigError(f"the tokenizer in {folder} has no tokenizer.json form, which streaming needs")
        return cls(fast)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a text; the model's vocabulary may be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end token, if it has one; the model's configuration may name more."""
        token = self._fast.eos_token_id
        return () if token is None else (token,)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        The chat template writes all special tokens itself; none is added. Raises `BadPrompt` where
        there is no template, or where it does not accept these messages.
        """
        from jinja2 import TemplateError

        if not self._fast.chat_template:
            raise BadPrompt("the model has no chat template; give the prompt as text instead of messages")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._fast.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise BadPrompt(
                f"the model's chat template refuses the messages: {_first_line(error)}"
            ) from error
        assert isinstance(text, str)
        return self._encode(text, add_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, with the special tokens that the tokenizer adds to a text."""
        return self._encode(text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a part of a text, with no special token added."""
        return self._encode(text, add_special_tokens=False)

    def token_bytes(self, num_tokens: int) -> list[bytes]:
        """The text of each id below `num_tokens`; none for special tokens and ids that have no text.

        Raises `BadSampling` where a token alone does not decide its bytes.
        """
        if self._token_bytes is None:
            raise BadSampling("json_schema and regex need a byte-level tokenizer, and this model's is none")
        return [self._token_bytes[token] for token in range(num_tokens)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; special tokens and ids without text give none."""
        return self._backend.decode(list(tokens), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A decoder for one answer; its pieces together are the text of `decode`."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return Detokenizer(self._backend, self._special)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise BadPrompt("the prompt is not valid Unicode: it holds half of a surrogate pair") from error
        return encoding.ids


class TokenBytes(dict[int, bytes]):
    """Bytes of each token of a byte-level vocabulary; none for special tokens and ids without text.

    An entry is made when its token is first asked for. `special` are the names of the special tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: frozenset[str]) -> None:
        super().__init__()
        self._backend = backend
        self._special = special
        self._byte_of = byte_of_letter()

    def __missing__(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None or name in self._special:
            value = b""
        elif all(letter in self._byte_of for letter in name):
            value = bytes([self._byte_of[letter] for letter in name])
        else:  # an added token, which stands for itself
            value = name.encode()
        self[token] = value
        return value


class ByteDetokenizer:
    """Text of one answer of a byte-level model, whose text is that of its tokens' bytes in a row.

    What is held back is the beginning of a code point, three bytes at most. Bytes that make none
    become one U+FFFD for each longest beginning of a code point, in Python as in `tokenizers`.
    """

    __slots__ = ("_bytes_of", "_rest")

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes_of = token_bytes.__getitem__
        self._rest = b""

    # The decoding function of the incremental decoder of `codecs`, in a third of that object's time.
    def push(self, token: int) -> str:
        raw = self._rest + self._bytes_of(token)
        text, num_used = codecs.utf_8_decode(raw, "replace")
        self._rest = raw[num_used:]
        return text

    def push_all(self, tokens: Sequence[int]) -> str:
        raw = self._rest + b"".join(map(self._bytes_of, tokens))
        text, num_used = codecs.utf_8_decode(raw, "replace")
        self._rest = raw[num_used:]
        return text

    def flush(self) -> str:
        raw, self._rest = self._rest, b""
        return raw.decode(errors="replace")


class Detokenizer:
    """Text of one answer in pieces of whole code points, whatever the tokenizer's decoder does.

    All pieces and `flush` together are the text of `Tokenizer.decode`. Text is held back while it
    ends in bytes that may be the beginning of a code point. The window that is decoded at each push
    begins at the last place but one where nothing was held back: a decoder may treat the first
    token of a text in its own way, so the new tokens are never the first.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: frozenset[int]) -> None:
        self._backend = backend
        self._special = special
        self._window: list[int] = []
        self._num_context = 0
        """Tokens of the window whose text is out already."""
        self._num_shown = 0
        """Code points of the window's text that are out already."""

    def push(self, token: int) -> str:
        """The text that is certain now and has not been returned yet."""
        if token in self._special or self._backend.id_to_token(token) is None:
            return ""
        self._window.append(token)
        text = self._text()
        held = len(text) - len(text.rstrip(REPLACEMENT))
        if held and len(self._window) - self._num_context <= LONGEST_WAIT:
            return self._show(text[: len(text) - held])
        piece = self._show(text)
        # The context must have a text, or the next token would be a first one after all.
        if text:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_shown = len(self._text())
        return piece

    def push_all(self, tokens: Sequence[int]) -> str:
        return "".join([self.push(token) for token in tokens])

    def flush(self) -> str:
        """What is left at the end of the answer, undecodable bytes included."""
        return self._show(self._text())

    def _show(self, text: str) -> str:
        piece = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return piece

    def _text(self) -> str:
        return self._backend.decode(self._window, skip_special_tokens=False)


def byte_of_letter() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes (Radford et al., GPT-2, 2019).

    Printable bytes of Latin-1 are their own letters; the others take those from U+0100 on, in order.
    """
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def _first_line(error: Exception) -> Any:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
