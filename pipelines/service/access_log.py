"""One line of JSON for each request, with OpenTelemetry's names where it has some. Never prompts or keys."""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson

from pipelines.cost import Price
from pipelines.service.observation import Observation

LOGGER = "dflash_ray.access"
logger = logging.getLogger(LOGGER)
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}


class AccessLog:
    """Writes each request at INFO, those that failed inside at ERROR."""

    def __init__(self, model: str, price: Price | None) -> None:
        self._model = model
        self._price = price

    def write(self, seen: Observation) -> None:
        level = logging.ERROR if seen.status >= 500 else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "%s", orjson.dumps(self._line(seen)).decode())

    def _line(self, seen: Observation) -> dict[str, Any]:
        line: dict[str, Any] = {
            "request_id": f"req_{seen.request_id}",
            "http.request.method": seen.method,
            "http.route": seen.route,
            "http.response.status_code": seen.status,
            "duration_s": round(seen.duration_s, 6),
            "user.id": seen.owner,
        }
        return {**line, **self._answers(seen)} if seen.usages else line

    def _answers(self, seen: Observation) -> dict[str, Any]:
        """Of all choices together; a prompt counts once for each."""
        usages = [record.usage for record in seen.usages]
        steps = sum(usage.steps for usage in usages)
        firsts = [record.ttft_s for record in seen.usages if record.ttft_s is not None]
        behind_first = sum(usage.completion_tokens - 1 for usage in usages if usage.steps)
        busy_ns = sum(usage.busy_ns for usage in usages)
        return {
            "gen_ai.operation.name": _OPERATIONS.get(seen.route, seen.route),
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
            "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in usages),
            "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
            "gen_ai.response.finish_reasons": [record.finish_reason for record in seen.usages],
            "gen_ai.response.time_to_first_chunk": round(min(firsts), 6) if firsts else None,
            "dflash.acceptance_length": round(behind_first / steps, 3) if steps else None,
            "dflash.busy_s": busy_ns / 1e9,
            "dflash.cost_usd": None if self._price is None else float(self._price.cost_usd(busy_ns)),
        }


def log_to_stderr() -> None:
    """For a process whose logging nobody has set up: lines as they are, on stderr. Once for all callers."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
