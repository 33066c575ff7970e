"""Exact block-diffusion speculative decoding (DFlash) with continuous batching.

Importing this package loads neither torch nor a model; `DFlashEngine` and `AsyncEngine` do when used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_engine.config import EngineConfig
from dflash_engine.errors import (
    BadPrompt,
    BadSampling,
    ConfigError,
    EngineDead,
    EngineError,
    PromptTooLong,
    RequestError,
)
from dflash_engine.health import EngineHealth
from dflash_engine.request import (
    Chunk,
    Message,
    Priority,
    Request,
    Result,
    SamplingParams,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from dflash_engine.async_engine import AsyncEngine
    from dflash_engine.engine import DFlashEngine

__all__ = [
    "AsyncEngine",
    "BadPrompt",
    "BadSampling",
    "Chunk",
    "ConfigError",
    "DFlashEngine",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "EngineHealth",
    "Message",
    "Priority",
    "PromptTooLong",
    "Request",
    "RequestError",
    "Result",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name == "AsyncEngine":
        from dflash_engine.async_engine import AsyncEngine

        return AsyncEngine
    if name == "DFlashEngine":
        from dflash_engine.engine import DFlashEngine

        return DFlashEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
