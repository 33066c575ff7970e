"""Training prompts that repeat an evaluation prompt, whole or in a long part."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dflash_engine.bench_prompts import read_conversations
from dflash_engine.request import Message
from dflash_engine.tokenizer import Tokenizer
from dflash_engine.training.corpus import Corpus, Ints

NUM_WORDS = 13
NUM_CHARACTERS = 16
"""Of scripts without spaces between words."""
BOILERPLATE = 3
"""Evaluation prompts of one set that share a part of it: instructions, no content."""
SHORTEST = 12
"""Characters of a whole prompt that can count as repeated: `hello` is nobody's."""
WORD = re.compile(r"[^\W_]+")
IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")


class Apart:
    """What may not be trained on."""

    def __init__(self, files: Sequence[Path]) -> None:
        """JSONL files with messages. Raises `ConfigError`."""
        self._whole: set[str] = set()
        self._parts: set[int] = set()
        for file in files:
            counts: Counter[int] = Counter()
            for turns in read_conversations([file], 1 << 40):
                words = [normal_words(turn["content"]) for turn in turns if turn["role"] == "user"]
                self._whole |= {" ".join(each) for each in [*words, [w for part in words for w in part]]}
                counts.update({part for each in words for part in parts_of(each)})
            self._parts |= {part for part, count in counts.items() if count < BOILERPLATE}
        self._whole = {text for text in self._whole if len(text) >= SHORTEST}

    def repeats(self, text: str) -> bool:
        words = normal_words(text)
        return " ".join(words) in self._whole or any(part in self._parts for part in parts_of(words))


def contaminated(corpus: Corpus, tokenizer: Tokenizer, files: Sequence[Path]) -> Ints:
    """Numbers of the sequences whose prompt repeats one of the files'. Raises `ConfigError`."""
    if not files:
        return np.arange(0)
    apart = Apart(files)
    before, behind = template(tokenizer)
    verdicts: dict[bytes, bool] = {}
    found = []
    for index in range(len(corpus)):
        prompt = corpus.prompt(index)
        key = prompt.tobytes()
        if key not in verdicts:
            text = tokenizer.decode(_without(prompt.tolist(), before, behind))
            verdicts[key] = apart.repeats(text)
        if verdicts[key]:
            found.append(index)
    return np.array(found, dtype=np.int64)


def template(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that the chat template puts before and behind a single question."""
    one, other = (tokenizer.encode_chat([Message("user", text)]) for text in ("one", "Zwei"))
    before = _common(one, other)
    behind = _common(one[len(before) :][::-1], other[len(before) :][::-1])[::-1]
    return before, behind


def normal_words(text: str) -> list[str]:
    """Words in lower case without punctuation; each ideograph is a word of its own."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    spaced = IDEOGRAPH.sub(lambda match: f" {match[0]} ", plain)
    return WORD.findall(spaced)


def parts_of(words: Sequence[str]) -> Iterator[int]:
    """A number for every run of words, the longer ones of ideographs."""
    ideographs = sum(1 for word in words if IDEOGRAPH.match(word))
    length = NUM_CHARACTERS if 2 * ideographs > len(words) else NUM_WORDS
    for at in range(len(words) - length + 1):
        yield hash(tuple(words[at : at + length]))


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return list(one[:at])
    return list(one[: min(len(one), len(other))])


def _without(tokens: list[int], before: list[int], behind: list[int]) -> list[int]:
    if tokens[: len(before)] == before:
        tokens = tokens[len(before) :]
    if behind and tokens[-len(behind) :] == behind:
        tokens = tokens[: -len(behind)]
    return tokens
