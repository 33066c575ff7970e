"""Prompts and the target's own responses, as token ids.

On disk: `.npz` with `tokens` uint16 or uint32 (prompt then response of each sequence, one after the other),
`offsets` int64 [n + 1] and `prompt_lengths` int32 [n]; or the Parquet parts of a batch job with
`prompt_token_ids` and `token_ids`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_engine.errors import ConfigError

Ints = NDArray[np.int64]
COLUMNS = ("prompt_token_ids", "token_ids")


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """n sequences."""

    tokens: NDArray[Any]
    """uint16 or uint32, all sequences one after the other."""
    offsets: Ints
    """[n + 1]"""
    prompt_lengths: Ints
    """[n]"""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    @property
    def response_tokens(self) -> int:
        return int(self.offsets[-1] - self.prompt_lengths.sum())

    def sequence(self, index: int) -> NDArray[Any]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def prompt(self, index: int) -> NDArray[Any]:
        return self.sequence(index)[: self.prompt_lengths[index]]

    def take(self, indices: Ints) -> Corpus:
        """Those sequences, in this order."""
        parts = [self.sequence(int(index)) for index in indices]
        tokens = np.concatenate(parts) if parts else self.tokens[:0]
        return Corpus(tokens, _offsets([len(part) for part in parts]), self.prompt_lengths[indices])

    def clipped(self, length: int) -> Corpus:
        """Sequences cut to `length` tokens; those left with no response of two tokens go."""
        kept = np.flatnonzero(np.minimum(self.lengths, length) - self.prompt_lengths >= 2)
        parts = [self.sequence(int(index))[:length] for index in kept]
        tokens = np.concatenate(parts) if parts else self.tokens[:0]
        return Corpus(tokens, _offsets([len(part) for part in parts]), self.prompt_lengths[kept])

    def prompt_keys(self) -> NDArray[np.uint64]:
        """Equal for equal prompts."""
        keys = [
            int.from_bytes(hashlib.blake2b(np.uint32(self.prompt(index)).tobytes(), digest_size=8).digest())
            for index in range(len(self))
        ]
        return np.array(keys, dtype=np.uint64)

    @property
    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.tokens.astype(np.uint32), self.offsets, self.prompt_lengths):
            digest.update(array.tobytes())
        return digest.hexdigest()


def corpus_of(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> Corpus:
    """From pairs of prompt and response."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    flat = [token for prompt, response in sequences for part in (prompt, response) for token in part]
    return Corpus(
        np.array(flat, dtype=dtype),
        _offsets([len(prompt) + len(response) for prompt, response in sequences]),
        np.array([len(prompt) for prompt, _ in sequences], dtype=np.int64),
    )


def save_corpus(corpus: Corpus, path: Path) -> None:
    """Atomically: the file is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=corpus.tokens,
            offsets=corpus.offsets,
            prompt_lengths=corpus.prompt_lengths.astype(np.int32),
        )
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_corpus(paths: Sequence[str], limit: int | None = None) -> Corpus:
    """Everything that the folders and files hold, in the order of names. Raises `ConfigError`."""
    files = [file for path in paths for file in _files(Path(path))]
    if not files:
        raise ConfigError("data.paths: name folders or files with responses (docs/training.md says which)")
    parts = [_load_arrays(file) if file.suffix == ".npz" else _load_parquet(file) for file in files]
    lengths = np.concatenate([part.lengths for part in parts])
    wide = max(part.tokens.dtype.itemsize for part in parts)
    whole = Corpus(
        np.concatenate([part.tokens for part in parts]).astype(np.uint16 if wide == 2 else np.uint32),
        _offsets(lengths),
        np.concatenate([part.prompt_lengths for part in parts]),
    )
    return whole if limit is None else whole.take(np.arange(min(limit, len(whole))))


def split_held_out(corpus: Corpus, held_out: int, seed: int) -> tuple[Corpus, Corpus]:
    """Training and held-out sequences; all responses to one prompt are on the same side."""
    if not held_out:
        return corpus, corpus.take(np.arange(0))
    keys = corpus.prompt_keys()
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(np.unique(keys))[:held_out]
    is_held_out = np.isin(keys, chosen)
    # One response to each prompt is enough, and the first one is the greedy one where there are several.
    first = np.zeros(len(corpus), dtype=bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return corpus.take(np.flatnonzero(~is_held_out)), corpus.take(np.flatnonzero(is_held_out & first))


def _offsets(lengths: Any) -> Ints:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"data.paths: there is no {path}")
    folder = path / "data" if (path / "data").is_dir() else path
    files = sorted(file for file in folder.iterdir() if file.suffix in (".npz", ".parquet"))
    if not files:
        raise ConfigError(f"data.paths: {folder} holds neither .npz nor .parquet files")
    return files


def _load_arrays(path: Path) -> Corpus:
    try:
        with np.load(path) as arrays:
            corpus = Corpus(
                arrays["tokens"],
                arrays["offsets"].astype(np.int64),
                arrays["prompt_lengths"].astype(np.int64),
            )
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} does not hold tokens, offsets and prompt_lengths: {error}") from error
    if len(corpus.offsets) != len(corpus) + 1 or corpus.offsets[-1] != len(corpus.tokens):
        raise ConfigError(f"{path}: offsets do not fit tokens and prompt_lengths")
    return corpus


def _load_parquet(path: Path) -> Corpus:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        raise ConfigError(
            f"{path} has no column {' and '.join(missing)}: run the batch job with output_token_ids: true"
        )
    wanted = [*COLUMNS, *(["status"] if "status" in schema.names else [])]
    table = pq.read_table(path, columns=wanted)
    if "status" in wanted:
        table = table.filter(pa.compute.equal(table["status"], "ok"))
    pairs = zip(table[COLUMNS[0]].to_pylist(), table[COLUMNS[1]].to_pylist(), strict=True)
    return corpus_of([(prompt, said) for prompt, said in pairs if prompt and said], 1 << 32)
