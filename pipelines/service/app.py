"""The application: all routes over one engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dflash_engine.errors import EngineError
from pipelines.service.anthropic_routes import anthropic_router
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_client import EngineClient, ServedModel
from pipelines.service.errors import ApiError, EngineBusy, error_form
from pipelines.service.limits import Limits
from pipelines.service.models import models_router
from pipelines.service.openai_routes import openai_router
from pipelines.service.replies import error_reply, expected, json_reply
from pipelines.service.request_ids import RequestIds, request_id
from pipelines.service.service import Service, UsageRecord


def create_app(
    engine: EngineClient,
    model: ServedModel,
    config: ServiceConfig,
    *,
    limits: Limits | None = None,
    on_usage: Callable[[UsageRecord], None] | None = None,
) -> FastAPI:
    """The service of one model; its `Service` is `app.state.service`. Raises `ConfigError`.

    The engine is the caller's: it is not closed here.
    """
    service = Service(engine, model, config, limits=limits, on_usage=on_usage)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        service.drain()

    app = FastAPI(
        title="dflash-ray",
        # Bodies are described by the APIs that they follow.
        openapi_url=None,
        lifespan=lifespan,
        middleware=_middleware(config),
        redirect_slashes=False,
    )
    app.state.service = service
    app.include_router(openai_router(service))
    app.include_router(anthropic_router(service))
    app.include_router(models_router(service))
    for kind in (ApiError, EngineError, EngineBusy, Exception):
        app.add_exception_handler(kind, _told)
    app.add_exception_handler(HTTPException, _told_of_http)
    app.add_exception_handler(ClientDisconnect, _told_nobody)

    @app.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        healthy = service.healthy()
        return json_reply({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)

    return app


def _middleware(config: ServiceConfig) -> list[Middleware]:
    stack = [Middleware(RequestIds)]
    if config.cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after"],
            )
        )
    return stack


async def _told(http: HttpRequest, error: Exception) -> Response:
    return error_reply(expected(error), error_form(http.url.path, http.headers), request_id(http))


async def _told_of_http(http: HttpRequest, error: Exception) -> Response:
    """What the router refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    names = {404: f"there is no {http.url.path}", 405: f"{http.url.path} does not take {http.method}"}
    refusal = ApiError(error.status_code, names.get(error.status_code, str(error.detail)))
    reply = error_reply(refusal, error_form(http.url.path, http.headers), request_id(http))
    reply.headers.update(error.headers or {})
    return reply


async def _told_nobody(http: HttpRequest, error: Exception) -> Response:
    """The client went while it sent its body."""
    return Response(status_code=499)
