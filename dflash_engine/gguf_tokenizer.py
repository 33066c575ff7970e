"""The tokenizer inside a GGUF file, as a Hugging Face tokenizer.

transformers has a conversion too, but it cuts text in GPT-2's way whatever the file says, and so
gives other tokens than the model was trained on (SmolLM2 sets digits apart, for one).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from dflash_engine.errors import ConfigError
from dflash_engine.gguf_config import GgufMetadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen and Llama 3 cut text into words; they differ in how many digits stay together."""
WORDS_OF = {
    "qwen2": WORDS.format(numbers=r"\p{N}"),
    "deepseek-r1-qwen": WORDS.format(numbers=r"\p{N}"),
    "llama-bpe": WORDS.format(numbers=r"\p{N}{1,3}"),
}
PRE_TOKENIZERS = ("gpt-2", "smollm", *WORDS_OF)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def build_tokenizer(metadata: GgufMetadata) -> PreTrainedTokenizerFast:
    """Tokenizer with special tokens and chat template. Raises `ConfigError` for kinds not known."""
    from transformers import PreTrainedTokenizerFast

    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"{metadata.path}: tokenizer kind {kind!r} is not supported, only gpt2 (byte-level BPE); "
            "use the model's Hugging Face folder"
        )
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.token(key)
        if token is not None:
            settings[f"{name}_token"] = tokens[token]
    template = metadata.get("tokenizer.chat_template", None)
    if template is not None:
        settings["chat_template"] = template
    backend = _byte_level_bpe(metadata, tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _byte_level_bpe(metadata: GgufMetadata, tokens: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata, pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = token_type == TokenType.CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    bos = metadata.token("bos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        _add_bos(tokenizer, tokens[bos], bos)
    return tokenizer


def _pre_tokenizer(metadata: GgufMetadata, pre: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{metadata.path}: pre-tokenizer {pre!r} is not known, only {', '.join(PRE_TOKENIZERS)}; "
            "use the model's Hugging Face folder"
        )
    if pre in WORDS_OF:
        words = pre_tokenizers.Split(Regex(WORDS_OF[pre]), behavior="isolated")
        return pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_gpt2])
    return as_gpt2


def _add_bos(tokenizer: Tokenizer, token: str, token_id: int) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, token_id)]
    )
