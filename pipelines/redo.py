"""Rows done again on top of what is written: those that failed, and those that somebody put right.

A shard with such rows gets a part of the next generation, which takes over all other rows as they are. Lines
of a repairs file find their shards through the error records of the output, and are kept beside them
(`_repairs/`) until the job is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson

from dflash_engine.request import SamplingParams
from pipelines.errors import JobRefused
from pipelines.inputs import FileKind, Input, file_lines, find_input
from pipelines.parse import RowParser
from pipelines.repairs import parse_repair
from pipelines.rows import BadRow, InputRow
from pipelines.storage import Store
from pipelines.storage_config import StorageConfig
from pipelines.write import Base, Part, PartWriter

REPAIRS_PREFIX = "_repairs/"


@dataclass(frozen=True, slots=True)
class Redo:
    """A shard of which some rows are done again."""

    part: Part
    """What is written."""
    base: Part
    """The part that it takes the other rows from."""
    retry: bool
    """Every row that failed, and not only those that were put right."""
    repaired: bool
    """Whether there is an object of lines that were put right."""


@dataclass(frozen=True, slots=True)
class Task:
    """The rows of a part that go into an engine, and what the rest of it is taken from."""

    rows: Sequence[InputRow]
    base: Base | None = None


@dataclass(frozen=True, slots=True)
class Repairs:
    """Lines that were put right, by the ids of their rows."""

    lines: Mapping[str, bytes]

    def of(self, writer: PartWriter, part: Part) -> list[bytes]:
        """Those whose rows stand as errors in a part."""
        if not self.lines:
            return []
        ids = (orjson.loads(line)["row_id"] for line in writer.error_lines(part))
        return [self.lines[row_id] for row_id in ids if row_id in self.lines]


def holds_repairs(source: Input) -> bool:
    """True where the input is no prompts, but lines of error records: their first line tells."""
    for file in source.files:
        if file.kind is FileKind.PARQUET:
            return False
        with source.store.open(file.key) as stream:
            for line in file_lines(stream, file.kind):
                if line.raw.strip():
                    return _is_repair(line.raw)
    return False


def read_repairs(uri: str | None, settings: StorageConfig) -> Repairs:
    """The lines of a file, folder or glob; a row's last one counts. Raises `JobRefused` for a bad one."""
    if uri is None:
        return Repairs({})
    source = find_input(uri, settings)
    lines: dict[str, bytes] = {}
    for file in source.files:
        with source.store.open(file.key) as stream:
            for line in file_lines(stream, file.kind):
                if not line.raw.strip():
                    continue
                try:
                    lines[parse_repair(line.raw).row_id] = line.raw
                except BadRow as error:
                    place = f"{file.key}, byte {line.offset}"
                    raise JobRefused(f"repairs {uri} ({place}): {error}") from error
    return Repairs(lines)


def plan_redos(
    writer: PartWriter, parts: Sequence[Part], repairs: Repairs, *, retry_errors: bool
) -> dict[str, Redo]:
    """The shards that have rows to be done again, by their ids; told by their error records."""
    if not retry_errors and not repairs.lines:
        return {}
    failed = set(writer.store.keys("errors/"))
    redos: dict[str, Redo] = {}
    for base in parts:
        if base.errors_key not in failed:
            continue
        part = Part(base.shard_id, base.generation + 1)
        repaired = repairs.of(writer, base)
        if repaired:
            writer.store.put(_repairs_key(part), b"\n".join(repaired))
        if repaired or retry_errors:
            redos[base.shard_id] = Redo(part, base, retry_errors, bool(repaired))
    return redos


def task_of(
    writer: PartWriter, rows: Sequence[InputRow], redo: Redo | None, defaults: SamplingParams
) -> Task:
    """What is to be done of a shard's rows."""
    if redo is None:
        return Task(rows)
    records = writer.read(redo.base, ("row_id", "status"))
    assert [record["row_id"] for record in records] == [row.row_id for row in rows], redo.base
    repaired: dict[str, InputRow] = {}
    if redo.repaired:
        parser = RowParser(defaults)
        found = (parse_repair(line) for line in _kept(writer.store, redo.part))
        repaired = {row.row_id: row.parse(parser) for row in found}
    places = [
        number
        for number, record in enumerate(records)
        if record["status"] != "ok" and (redo.retry or record["row_id"] in repaired)
    ]
    again = [repaired.get(rows[place].row_id, rows[place]) for place in places]
    return Task(again, Base(redo.base, places))


def _is_repair(line: bytes) -> bool:
    try:
        parse_repair(line)
    except BadRow:
        return False
    return True


def _kept(store: Store, part: Part) -> Iterator[bytes]:
    yield from store.get(_repairs_key(part)).split(b"\n")


def _repairs_key(part: Part) -> str:
    return f"{REPAIRS_PREFIX}part-{part.name}.jsonl"
