"""The seam to the engine: what a pipeline asks of it, and which one a config means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dflash_engine.config import EngineConfig
from dflash_engine.fake import FakeEngine, is_fake
from dflash_engine.request import Request, Result


class Engine(Protocol):
    """What generation needs of `AsyncEngine`; `FakeEngine` has it too."""

    @property
    def fingerprint(self) -> str: ...
    async def generate(self, request: Request) -> Result: ...


EngineFactory = Callable[[EngineConfig], Engine]


def open_engine(config: EngineConfig) -> Engine:
    """The engine of a config, loaded. Raises `ConfigError` in one sentence."""
    if is_fake(config.model):
        return FakeEngine(config)
    # Imported here, for it brings torch: drivers and readers start without.
    from dflash_engine.async_engine import AsyncEngine

    return AsyncEngine(config)


class PromptEncoder(Protocol):
    """What is asked of prompts without an engine."""

    def encode(self, request: Request) -> Sequence[int]:
        """Token ids. Raises `RequestError` where the engine would refuse the prompt."""
        ...


def open_encoder(config: EngineConfig) -> PromptEncoder:
    """That of the engine of a config. Raises `ConfigError` in one sentence."""
    if is_fake(config.model):
        return FakeEngine(config)
    # Imported here, for it brings transformers: drivers and readers start without.
    from dflash_engine import prompt_encoder

    return prompt_encoder.PromptEncoder.open(config)


def check_model(config: EngineConfig) -> None:
    """See that model and draft are there before anything starts. Raises `ConfigError`.

    Fetches or expands what is not on this machine yet, so ask only where the engine will run.
    """
    if is_fake(config.model):
        FakeEngine(config)
        return
    from dflash_engine.catalog import resolve_draft, resolve_model

    resolve_model(config.model)
    resolve_draft(config.draft, config.model)
