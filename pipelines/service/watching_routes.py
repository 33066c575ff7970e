"""Routes for those who watch the service: Prometheus and the page."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pipelines.service.engine_figures import EngineFigures
from pipelines.service.errors import ApiError
from pipelines.service.live import Live
from pipelines.service.metrics import Metrics
from pipelines.service.replies import json_reply
from pipelines.service.service import Service


def watching_router(service: Service, metrics: Metrics, figures: EngineFigures, live: Live) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_model=None)
    async def all_metrics(http: HttpRequest) -> Response:
        owner = service.authenticate(http)
        config = service.config
        if config.keys is not None and owner.name not in config.metrics_owners:
            raise ApiError(
                403,
                f"/metrics has figures of all owners, and {owner.name} is not among service.metrics_owners",
                code="metrics_not_allowed",
            )
        return Response(metrics.text(await figures.engines()), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @router.get("/live", response_model=None)
    async def now(http: HttpRequest) -> Response:
        service.authenticate(http)
        reply = json_reply(await live.now())
        reply.headers["cache-control"] = "no-store"
        return reply

    return router
