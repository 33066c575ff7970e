"""Model and engine in this process, and a server for them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from dflash_engine.config import EngineConfig
from dflash_engine.fake import MAX_MODEL_LEN, FakeEngine, is_fake
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_client import EngineClient, ServedModel
from pipelines.service.word_tokenizer import WordTokenizer

BACKLOG = 2048


class LocalEngine(EngineClient, Protocol):
    async def close(self) -> None: ...


def open_local(config: EngineConfig) -> LocalEngine:
    """The engine of a config, loaded. Raises `ConfigError`."""
    if is_fake(config.model):
        return FakeEngine(config)
    # Imported here, for it brings torch.
    from dflash_engine.async_engine import AsyncEngine

    return AsyncEngine(config)


def served_model(engine: EngineConfig, config: ServiceConfig) -> ServedModel:
    """What clients may know of the model, read from its files without its weights. Raises `ConfigError`."""
    name = config.model_name or engine.model
    if is_fake(engine.model):
        length = engine.max_model_len or MAX_MODEL_LEN
        return ServedModel(name, length, WordTokenizer(), int(time.time()), config.model_aliases)
    from dflash_engine.sources import find
    from pipelines.service.chat_tokenizer import TemplateTokenizer

    sources = find(engine)
    tokenizer = TemplateTokenizer.load(sources.folder)
    return ServedModel(name, sources.max_model_len, tokenizer, int(time.time()), config.model_aliases)


@contextmanager
def serving(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> Generator[str, None, None]:
    """Serves from a thread of its own; gives the base URL. Leaving waits for the answers being made."""
    listener = socket.create_server((host, port), backlog=BACKLOG)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    # Clients may connect from now on: what comes before the server runs waits in the backlog.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
