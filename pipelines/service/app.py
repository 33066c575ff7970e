"""The application: all routes over one engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dflash_engine.errors import EngineError
from dflash_engine.stats import EngineStats
from pipelines.cost import Price
from pipelines.service.access_log import AccessLog
from pipelines.service.anthropic_routes import anthropic_router
from pipelines.service.batch_routes import batch_router
from pipelines.service.batches import Batches, open_batches
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_client import EngineClient, ServedModel
from pipelines.service.engine_figures import EngineFigures, EngineSource
from pipelines.service.errors import ApiError, EngineBusy, error_form
from pipelines.service.file_routes import file_router
from pipelines.service.limits import Limits
from pipelines.service.live import Live
from pipelines.service.metrics import Metrics
from pipelines.service.models import models_router
from pipelines.service.observation import Observation, Observed, observe_usage
from pipelines.service.openai_routes import openai_router
from pipelines.service.openapi import openapi_router
from pipelines.service.page import page_router
from pipelines.service.replies import error_reply, expected, json_reply
from pipelines.service.request_ids import RequestIds, request_id
from pipelines.service.service import Service
from pipelines.service.usage_record import UsageRecord
from pipelines.service.watching_routes import watching_router


def create_app(
    engine: EngineClient,
    model: ServedModel,
    config: ServiceConfig,
    *,
    limits: Limits | None = None,
    on_usage: Callable[[UsageRecord], None] | None = None,
    batches: Batches | None = None,
    engine_stats: EngineSource | None = None,
    price: Price | None = None,
) -> FastAPI:
    """The service of one model; its `Service` is `app.state.service`. Raises `ConfigError`.

    The engine is the caller's: it is not closed here. `batches` are those of the config, unless given;
    `engine_stats` those of `engine`. `price` is that of an hour of one engine.
    """

    def used(record: UsageRecord) -> None:
        observe_usage(record)
        if on_usage is not None:
            on_usage(record)

    async def own_stats() -> dict[str, EngineStats]:
        return {"0": engine.stats()}

    service = Service(engine, model, config, limits=limits, on_usage=used)
    figures = EngineFigures(engine_stats or own_stats)
    metrics, access_log = Metrics(model.name, price), AccessLog(model.name, price)

    def seen(request: Observation) -> None:
        metrics.count_request(request)
        access_log.write(request)

    batches = batches or open_batches(config, model)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        async with batches.running() if batches is not None else nullcontext():
            yield
            service.drain()

    app = FastAPI(
        title="dflash-ray",
        openapi_url=None,  # `openapi_router` has it
        lifespan=lifespan,
        middleware=_middleware(config, seen),
        redirect_slashes=False,
    )
    app.state.service = service
    if config.shows_page:
        app.include_router(page_router())
    app.include_router(watching_router(service, metrics, figures, Live(model.name, figures, price)))
    app.include_router(openai_router(service))
    app.include_router(anthropic_router(service))
    app.include_router(models_router(service))
    app.include_router(file_router(service, batches))
    app.include_router(batch_router(service, batches))
    app.include_router(openapi_router())
    for kind in (ApiError, EngineError, EngineBusy, Exception):
        app.add_exception_handler(kind, _told)
    app.add_exception_handler(HTTPException, _told_of_http)
    app.add_exception_handler(ClientDisconnect, _told_nobody)

    @app.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        healthy = service.healthy()
        return json_reply({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)

    return app


def _middleware(config: ServiceConfig, see: Callable[[Observation], None]) -> list[Middleware]:
    stack = [Middleware(RequestIds), Middleware(Observed, see=see)]
    if config.cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
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
