"""Sequences side by side in rows of one length, so that every step has the same shapes."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_engine.training.corpus import Corpus

POOL = 4096
"""Sequences among which those that fill a row are looked for; rows stay as mixed as the corpus is."""

Int32s = NDArray[np.int32]
Sequences = tuple[tuple[int, int, int, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """R rows of S tokens. A row's sequences stand one after the other; the last one's tail is padding."""

    tokens: Int32s
    """[R, S]"""
    positions: Int32s
    """[R, S], in the own sequence; padding goes on from the last one."""
    firsts: Int32s
    """[R, S], column of the own sequence's first token."""
    labels: Int32s
    """[R, S], tokens that a block anchored here can be trained on: block size - 1 at most, 0 where no block
    may begin."""
    sequences: Sequences
    """(row, first column, length, prompt length, number in the corpus) of each one, by row and column."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def row_tokens(self) -> int:
        return int(self.tokens.shape[1])

    def arrays_of(self, rows: NDArray[np.int64]) -> PackedRows:
        """Those rows, in this order, without what is known of their sequences."""
        return PackedRows(self.tokens[rows], self.positions[rows], self.firsts[rows], self.labels[rows], ())

    def part(self, rows: NDArray[np.int64]) -> PackedRows:
        """Those rows, each once, in this order."""
        place = {int(row): at for at, row in enumerate(rows)}
        sequences = sorted(
            (place[row], column, length, prompt, number)
            for row, column, length, prompt, number in self.sequences
            if row in place
        )
        return PackedRows(
            self.tokens[rows], self.positions[rows], self.firsts[rows], self.labels[rows], tuple(sequences)
        )


def pack(corpus: Corpus, row_tokens: int, block_size: int, seed: int) -> PackedRows:
    """All sequences, shuffled; none may be longer than a row."""
    order = np.random.default_rng(seed).permutation(len(corpus))
    lengths = corpus.lengths
    assert len(corpus) == 0 or lengths.max() <= row_tokens
    members: list[list[int]] = []
    for begin in range(0, len(order), POOL):
        members += _fill(order[begin : begin + POOL], lengths, row_tokens)
    sequences = []
    for row, indices in enumerate(members):
        at = 0
        for index in indices:
            sequences.append((row, at, int(lengths[index]), int(corpus.prompt_lengths[index]), index))
            at += int(lengths[index])
    return _laid_out(corpus, tuple(sequences), len(members), row_tokens, block_size)


def _laid_out(
    corpus: Corpus, sequences: Sequences, num_rows: int, row_tokens: int, block_size: int
) -> PackedRows:
    shape = (num_rows, row_tokens)
    tokens, firsts, labels = (np.zeros(shape, np.int32) for _ in range(3))
    rows, columns, lengths, prompts, numbers = np.array(sequences, dtype=np.int64).reshape(-1, 5).T
    each = np.repeat(np.arange(len(rows)), lengths)
    within = np.arange(len(each)) - (np.cumsum(lengths) - lengths)[each]
    cells = (rows * row_tokens + columns)[each] + within
    tokens.reshape(-1)[cells] = corpus.tokens[corpus.offsets[numbers][each] + within]
    behind = np.minimum(lengths[each] - 1 - within, block_size - 1)
    labels.reshape(-1)[cells] = np.where(within >= prompts[each], behind, 0)
    # A row's sequences begin ever further right, so each one's first column holds up to the next one's.
    firsts[rows, columns] = columns
    firsts = np.maximum.accumulate(firsts, axis=1)
    positions = np.arange(row_tokens, dtype=np.int32) - firsts
    return PackedRows(tokens, positions, firsts, labels, sequences)


def _fill(pool: NDArray[np.int64], lengths: NDArray[np.int64], row_tokens: int) -> list[list[int]]:
    """Longest first, each where it leaves the least room."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in sorted(map(int, pool), key=lambda index: (-lengths[index], index)):
        length = int(lengths[index])
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            rows.append([])
            room, row = row_tokens, len(rows) - 1
        else:
            room, row = rooms.pop(at)
        rows[row].append(index)
        insort(rooms, (room - length, row))
    return rows
