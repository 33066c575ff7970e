"""Server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Proxies must pass each event on as it comes."""


def data(value: Mapping[str, Any]) -> bytes:
    """An event without a name, as OpenAI writes them."""
    return b"data: %b\n\n" % orjson.dumps(value)


def event(value: Mapping[str, Any]) -> bytes:
    """An event named by its type, as Anthropic writes them."""
    return b"event: %b\n%b" % (value["type"].encode(), data(value))
