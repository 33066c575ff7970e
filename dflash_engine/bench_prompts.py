"""What benchmarks ask: conversations of data sets as token ids, or tokens at random."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from dflash_engine.benchmarking import Prompt
from dflash_engine.catalog import resolve_model
from dflash_engine.errors import ConfigError
from dflash_engine.request import Message
from dflash_engine.tokenizer import Tokenizer

Conversation = list[dict[str, str]]


def chat_prompts(model: str, paths: Sequence[Path], limit: int) -> list[Prompt]:
    """The first conversations of the files through the model's chat template. Raises `ConfigError`."""
    conversations = read_conversations(paths, limit)
    tokenizer = Tokenizer.load(resolve_model(model))
    return [
        tuple(tokenizer.encode_chat([Message(turn["role"], turn["content"]) for turn in turns]))
        for turns in conversations
    ]


def read_conversations(paths: Sequence[Path], limit: int) -> list[Conversation]:
    """The first conversations of JSONL files whose rows have `messages`, `limit` in all, taken in turn from
    each file. Raises `ConfigError`."""
    files = [_read(path, limit) for path in paths]
    turns = itertools.zip_longest(*files)
    return [row for turn in turns for row in turn if row is not None][:limit]


def _read(path: Path, limit: int) -> list[Conversation]:
    try:
        with path.open(encoding="utf-8") as lines:
            rows = [json.loads(line)["messages"] for line in itertools.islice(lines, limit)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--dataset {path}: needs JSON rows with messages ({error!r})") from error
    if not rows:
        raise ConfigError(f"--dataset {path}: the file is empty")
    return rows


def random_prompts(num: int, length: int, vocab_size: int, seed: int = 0) -> list[Prompt]:
    noise = random.Random(seed)
    return [tuple(noise.randrange(vocab_size) for _ in range(length)) for _ in range(num)]
