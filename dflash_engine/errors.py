"""Every error that the engine shows its caller.

    EngineError
    ├── ConfigError        the engine cannot start as asked; says which setting and the way out
    ├── RequestError       one request cannot be answered; never ends the others
    │   ├── BadPrompt      empty, wrong shape, unknown role
    │   ├── PromptTooLong  prompt leaves no room for one token
    │   └── BadSampling    a sampling value of the wrong type or out of range
    └── EngineDead         a step failed; nothing more can be answered by this engine

`RequestError.code` is a stable word for programs (it goes into `error_type` of a batch row).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class EngineError(Exception):
    """Base of everything that the engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting, model or draft that cannot work."""


class RequestError(EngineError, ValueError):
    """One request that cannot be answered."""

    code = "invalid_request"


class BadPrompt(RequestError):
    """The prompt has no usable text, or a shape that is not known."""

    code = "invalid_prompt"


class PromptTooLong(RequestError):
    """The prompt leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"


class BadSampling(RequestError):
    """A sampling parameter of the wrong type or out of range."""

    code = "invalid_sampling"


class EngineDead(EngineError):
    """The engine failed inside a step and answers nothing any more."""


def describe(errors: Iterable[Mapping[str, Any]]) -> str:
    """One line from pydantic's error list: `field: reason; field: reason`."""
    return "; ".join(
        f"{'.'.join(str(part) for part in error['loc']) or 'value'}: {error['msg']}" for error in errors
    )
