"""Rows and their answers to the columns of a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_engine.config import EngineConfig
from dflash_engine.request import Result, Usage
from pipelines.answers import Answer
from pipelines.cost import Price
from pipelines.engines import PromptEncoder
from pipelines.openai_line import CHAT_URL, TEXT_URL
from pipelines.rows import TOKEN_IDS, InputRow, RowError
from pipelines.write import ErrorRecord, Rows

_NOTHING = Usage()


@dataclass(frozen=True, slots=True)
class Bill:
    """What the rows of a job are billed by."""

    price: Price
    engine: EngineConfig
    encoder: PromptEncoder | None = None
    """Where token ids are to be written."""


def output_rows(rows: Sequence[InputRow], answers: Sequence[Answer], bill: Bill) -> Rows:
    """The columns of answered rows, in their order; `gpu_seconds` is the time of all GPUs of the engine."""
    results = [answer if isinstance(answer, Result) else None for answer in answers]
    errors = [answer if isinstance(answer, RowError) else None for answer in answers]
    usages = [_NOTHING if result is None else result.usage for result in results]
    busy_ns = [usage.busy_ns * bill.engine.tensor_parallel_size for usage in usages]
    columns: dict[str, list[Any]] = {
        "row_id": [row.row_id for row in rows],
        "custom_id": [row.custom_id for row in rows],
        "status": ["ok" if error is None else "error" for error in errors],
        "text": [result and result.text for result in results],
        "finish_reason": [result and result.finish_reason for result in results],
        "prompt_tokens": [usage.prompt_tokens for usage in usages],
        "cached_tokens": [usage.cached_tokens for usage in usages],
        "completion_tokens": [usage.completion_tokens for usage in usages],
        "steps": [usage.steps for usage in usages],
        "drafted_tokens": [usage.drafted_tokens for usage in usages],
        "accepted_tokens": [usage.accepted_tokens for usage in usages],
        "gpu_seconds": [busy / 1e9 for busy in busy_ns],
        "cost_usd": [bill.price.cost_usd(busy) for busy in busy_ns],
        "error_type": [error and error.code for error in errors],
        "error_message": [error and error.message for error in errors],
        "model": [bill.engine.model] * len(rows),
        "url": [_url(row) for row in rows],
    }
    carried = [_carried(row, result) for row, result in zip(rows, results, strict=True)]
    if bill.encoder is not None:
        ids = [_token_ids(row, result, bill.encoder) for row, result in zip(rows, results, strict=True)]
        carried = [{**values, **more} for values, more in zip(carried, ids, strict=True)]
    return Rows(columns, carried)


def _url(row: InputRow) -> str | None:
    """Which of OpenAI's endpoints the row would be for."""
    if row.request is None:
        return None
    return CHAT_URL if row.request.messages is not None else TEXT_URL


def _token_ids(row: InputRow, result: Result | None, encoder: PromptEncoder) -> Mapping[str, Any]:
    if result is None or row.request is None:
        return dict.fromkeys(TOKEN_IDS)
    return {"prompt_token_ids": list(encoder.encode(row.request)), "token_ids": list(result.tokens)}


def error_records(rows: Sequence[InputRow], answers: Sequence[Answer]) -> list[ErrorRecord]:
    """A record of each row without an answer."""
    pairs = zip(rows, answers, strict=True)
    return [ErrorRecord(row, answer) for row, answer in pairs if isinstance(answer, RowError)]


def _carried(row: InputRow, result: Result | None) -> Mapping[str, Any]:
    if result is None or result.logprobs is None:
        return row.carried
    logprobs = [
        {
            "token": item.token,
            "logprob": item.logprob,
            "top": [{"token": token, "logprob": logprob} for token, logprob in item.top],
        }
        for item in result.logprobs
    ]
    return {**row.carried, "logprobs": logprobs}
