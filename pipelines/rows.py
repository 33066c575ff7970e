"""A row on its way: as read, as it travels between processes, and as written.

A carried column keeps its JSON value. In Parquet every part of a job has the same columns: the types are
found once in a sample of the input (`carried_kinds`); a column whose values agree on text, integer,
number or truth value gets that type, any other holds JSON text. A value that fits no column of its own
goes into the last column `extra`, a JSON object, so nothing is lost and no schema changes on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import orjson
import pyarrow as pa

from dflash_engine.request import Message, Request, SamplingParams

Kind = Literal["string", "int64", "double", "bool", "json", "tokens"]

COST_TYPE = pa.decimal128(38, 12)
RESULT_FIELDS = (
    pa.field("row_id", pa.string(), nullable=False),
    pa.field("custom_id", pa.string()),
    pa.field("status", pa.string(), nullable=False),
    pa.field("text", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int64(), nullable=False),
    pa.field("cached_tokens", pa.int64(), nullable=False),
    pa.field("completion_tokens", pa.int64(), nullable=False),
    pa.field("steps", pa.int64(), nullable=False),
    pa.field("drafted_tokens", pa.int64(), nullable=False),
    pa.field("accepted_tokens", pa.int64(), nullable=False),
    pa.field("gpu_seconds", pa.float64(), nullable=False),
    pa.field("cost_usd", COST_TYPE, nullable=False),
    pa.field("error_type", pa.string()),
    pa.field("error_message", pa.string()),
    pa.field("model", pa.string(), nullable=False),
)
EXTRA = "extra"
"""Last column: carried values that fit no column, and log probabilities where they were asked for."""
TOKEN_IDS: Mapping[str, Kind] = {"prompt_token_ids": "tokens", "token_ids": "tokens"}
"""Columns of a job that asks for token ids."""
RESERVED = frozenset(column.name for column in RESULT_FIELDS) | {EXTRA, "logprobs", *TOKEN_IDS}

PAYLOAD_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("offset", pa.int64()),
        ("custom_id", pa.string()),
        ("prompt", pa.large_binary()),
        ("sampling", pa.large_string()),
        ("carried", pa.large_binary()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("raw", pa.large_binary()),
    ]
)

_ARROW_TYPES: Mapping[Kind, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "bool": pa.bool_(),
    "json": pa.string(),
    "tokens": pa.list_(pa.int32()),
}


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no answer; `code` is a stable word."""

    code: str
    message: str


class BadRow(Exception):
    """A row that cannot become a request; raised and caught while it is parsed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


def type_name(value: object) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRow:
    """One row as read: a request, or the reason why it is none."""

    row_id: str
    """`file:offset`, the identity of the row; custom_ids may repeat."""
    offset: int
    """Byte offset of the line in its (decompressed) file, or row number in a Parquet file."""
    raw: bytes
    """The row as it came; JSON text for Parquet."""
    custom_id: str | None = None
    request: Request | None = None
    carried: Mapping[str, Any] = field(default_factory=dict)
    error: RowError | None = None

    @property
    def file(self) -> str:
        """The key of the file that the row stands in."""
        return self.row_id.rpartition(":")[0]


def seed_for(job_seed: int, row_id: str) -> int:
    """The seed of a row that names none: the same in every run of the job. In [0, 2**63)."""
    return int.from_bytes(blake2b(f"{job_seed}:{row_id}".encode(), digest_size=8).digest()) >> 1


def encode_rows(rows: Sequence[InputRow]) -> bytes:
    """Rows as one Arrow IPC stream, for the trip to an actor."""
    requests = [row.request for row in rows]
    errors = [row.error for row in rows]
    # Rows that ask for the same share one object, see `RowParser`.
    samplings = {id(request.sampling): request.sampling for request in requests if request is not None}
    texts = {key: value.model_dump_json(exclude_defaults=True) for key, value in samplings.items()}
    columns = {
        "row_id": [row.row_id for row in rows],
        "offset": [row.offset for row in rows],
        "custom_id": [row.custom_id for row in rows],
        "prompt": [request and _encode_prompt(request) for request in requests],
        "sampling": [request and texts[id(request.sampling)] for request in requests],
        "carried": [orjson.dumps(row.carried) if row.carried else b"{}" for row in rows],
        "error_type": [error and error.code for error in errors],
        "error_message": [error and error.message for error in errors],
        "raw": [row.raw for row in rows],
    }
    sink = pa.BufferOutputStream()
    # The parsed prompt repeats the raw line: lz4 takes most of that back at memory speed.
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, PAYLOAD_SCHEMA, options=options) as writer:
        writer.write_table(pa.table(columns, schema=PAYLOAD_SCHEMA))
    payload: bytes = sink.getvalue().to_pybytes()
    return payload


def decode_rows(payload: bytes) -> list[InputRow]:
    """The rows of `encode_rows`."""
    with pa.ipc.open_stream(payload) as reader:
        table = reader.read_all()
    columns = [table.column(name).to_pylist() for name in PAYLOAD_SCHEMA.names]
    texts = set(columns[PAYLOAD_SCHEMA.get_field_index("sampling")]) - {None}
    samplings = {text: SamplingParams(**orjson.loads(text)) for text in texts}
    return [
        InputRow(
            row_id=row_id,
            offset=offset,
            raw=raw,
            custom_id=custom_id,
            request=None if prompt is None else _decode_request(prompt, samplings[sampling], row_id),
            carried=orjson.loads(carried),
            error=None if error_type is None else RowError(error_type, error_message),
        )
        for row_id, offset, custom_id, prompt, sampling, carried, error_type, error_message, raw in zip(
            *columns, strict=True
        )
    ]


def _encode_prompt(request: Request) -> bytes:
    """JSON: turns as pairs, raw text as text, token ids as numbers."""
    if request.messages is not None:
        return orjson.dumps([(turn.role, turn.content) for turn in request.messages])
    return orjson.dumps(request.text if request.text is not None else request.token_ids)


def _decode_request(prompt: bytes, sampling: SamplingParams, row_id: str) -> Request:
    value = orjson.loads(prompt)
    if isinstance(value, str):
        return Request(text=value, sampling=sampling, request_id=row_id)
    if isinstance(value[0], int):
        return Request(token_ids=tuple(value), sampling=sampling, request_id=row_id)
    messages = tuple([Message(role, content) for role, content in value])
    return Request(messages=messages, sampling=sampling, request_id=row_id)


def carried_kinds(samples: Iterable[Mapping[str, Any]]) -> dict[str, Kind]:
    """One kind for each carried column of the sampled rows, in order of first appearance."""
    seen: dict[str, set[Kind]] = {}
    for sample in samples:
        for name, value in sample.items():
            kinds = seen.setdefault(name, set())
            if value is not None:
                kinds.add(_kind(value))
    return {name: _common(kinds) for name, kinds in seen.items()}


def output_schema(carried: Mapping[str, Kind]) -> pa.Schema:
    """Columns of every Parquet part of a job."""
    columns = [pa.field(name, _ARROW_TYPES[kind]) for name, kind in carried.items()]
    return pa.schema([*RESULT_FIELDS, *columns, pa.field(EXTRA, pa.string())])


def carried_columns(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Carried values laid into the columns of `output_schema`; what does not fit goes into `extra`."""
    columns: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is None or not _fits(value, kind):
            extra[name] = value
        elif kind == "json" and value is not None:
            columns[name] = orjson.dumps(value).decode()
        else:
            columns[name] = value
    columns[EXTRA] = orjson.dumps(extra).decode() if extra else None
    return columns


def _kind(value: Any) -> Kind:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64" if -(2**63) <= value < 2**63 else "json"
    if isinstance(value, float):
        return "double"
    return "string" if isinstance(value, str) else "json"


def _common(kinds: set[Kind]) -> Kind:
    if len(kinds) == 1:
        return next(iter(kinds))
    return "double" if kinds == {"int64", "double"} else "json"


def _fits(value: Any, kind: Kind) -> bool:
    if value is None or kind in ("json", "tokens"):
        return True
    if kind == "double" and isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= 2**53
    return _kind(value) == kind
