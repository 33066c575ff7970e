"""A grammar as a request names it: JSON Schema or a regular expression, not compiled yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

MAX_GRAMMAR_CHARS = 1 << 16
"""Of a schema or regular expression; its compiled form grows with it."""


class GrammarText(NamedTuple):
    """What an answer has to be a text of."""

    kind: Literal["json_schema", "regex"]
    text: str


def schema_text(value: object) -> object:
    """A schema given as an object or JSON text, as JSON text in one form; any other value as it is.

    Equal schemas are compiled once then; the order of properties counts. Raises `ValueError`.
    """
    if not isinstance(value, str | Mapping):
        return value
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError) as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(schema, Mapping):
        raise ValueError("a schema is a JSON object")
    return text
