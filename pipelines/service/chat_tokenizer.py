"""A model's tokenizer and chat template, with tools, thoughts and the bytes of single tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dflash_engine.errors import BadPrompt, ConfigError
from dflash_engine.tokenizer import TokenBytes, Tokenizer
from pipelines.service.dialect import Dialect, read_dialect
from pipelines.service.engine_client import ChatPrompt, Tool, Turn
from pipelines.service.output import THINK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PROBE = "kestrel"


class TemplateTokenizer:
    """Implements `ChatTokenizer`. Conversations without tools get the ids that the engine would give them."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        from tokenizers.decoders import ByteLevel

        self._fast = fast
        self._plain = Tokenizer(fast)
        # What the template's own function takes is not for clients to set: a template least of all.
        self._reserved = frozenset(inspect.signature(fast.apply_chat_template).parameters) | {"messages"}
        byte_level = isinstance(fast.backend_tokenizer.decoder, ByteLevel)
        self._bytes = TokenBytes(fast.backend_tokenizer, frozenset()) if byte_level else None

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the tokenizer files of a model folder. Raises `ConfigError`."""
        from transformers import AutoTokenizer  # seconds of import

        try:
            fast: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"no tokenizer can be read from {folder}: {error}") from error
        return cls(fast)

    @cached_property
    def dialect(self) -> Dialect:
        if not self._fast.chat_template:
            return Dialect()
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
        template = str(self._fast.get_chat_template(None, [tool]))
        return read_dialect(template, system_anywhere=self._takes_system_anywhere())

    def encode_chat(
        self, turns: Sequence[Turn], tools: Sequence[Tool] = (), options: Mapping[str, Any] | None = None
    ) -> ChatPrompt:
        text = self._render(turns, tools, options or {})
        tokens = tuple(self._plain.encode_plain(text))
        return ChatPrompt(tokens, thinking=text.rstrip().endswith(THINK))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._plain.decode(tokens)

    def token_bytes(self, token: int) -> bytes:
        if self._bytes is not None:
            return self._bytes[token]
        return self._fast.backend_tokenizer.decode([token], skip_special_tokens=False).encode()

    def _render(self, turns: Sequence[Turn], tools: Sequence[Tool], options: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        if not self._fast.chat_template:
            raise BadPrompt("the model has no chat template; ask it by /v1/completions")
        for name in options:
            if name in self._reserved:
                raise BadPrompt(f"the template's {name} cannot be set")
        try:
            text = self._fast.apply_chat_template(
                [dict(turn) for turn in turns],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        # Templates are programs of others: what they raise for odd values is not known beforehand.
        except (TemplateError, LookupError, RecursionError, TypeError, ValueError, AttributeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadPrompt(f"the model's chat template refuses the messages: {reason}") from error
        assert isinstance(text, str)
        return text

    def _takes_system_anywhere(self) -> bool:
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "system", "content": _PROBE},
            {"role": "user", "content": "c"},
        ]
        try:
            return _PROBE in self._render(turns, (), {})
        except BadPrompt:
            return False
