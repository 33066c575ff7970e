"""Compressed files read one after the other and cut into runs of lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import BinaryIO

from pipelines.inputs import InputFile, file_lines
from pipelines.lines import Line
from pipelines.parse import is_blank
from pipelines.storage import Store

KeyedLine = tuple[str, Line]


class LineStream:
    """The lines of some files that are not blank, up to the limit of each file."""

    def __init__(self, store: Store, files: Sequence[InputFile], max_line_bytes: int) -> None:
        self._store = store
        self._files = files
        self._max_line_bytes = max_line_bytes
        self._stream: BinaryIO | None = None
        self._finished_bytes = 0
        self._current_bytes = 0

    @property
    def reached(self) -> int:
        """How many compressed bytes are read."""
        if self._stream is None:
            return self._finished_bytes
        # A stream read to its end is closed by the decompressor.
        current = self._current_bytes if self._stream.closed else self._stream.tell()
        return self._finished_bytes + current

    def runs(self, most_rows: int, most_bytes: int) -> Iterator[list[KeyedLine]]:
        """Lines with the keys of their files, in runs of `most_rows`, ended where they reach `most_bytes`."""
        run: list[KeyedLine] = []
        size = 0
        for key, line in self._lines():
            run.append((key, line))
            size += len(line.raw) + 1
            if len(run) == most_rows or size >= most_bytes:
                yield run
                run, size = [], 0
        if run:
            yield run

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _lines(self) -> Iterator[KeyedLine]:
        for file in self._files:
            self._stream, self._current_bytes = self._store.open(file.key), file.size_bytes
            lines = file_lines(self._stream, file.kind, self._max_line_bytes)
            rows = (line for line in lines if line.error is not None or not is_blank(line.raw, line.offset))
            yield from ((file.key, line) for line in islice(rows, file.stop))
            self.close()
            self._stream = None
            self._finished_bytes += file.size_bytes
