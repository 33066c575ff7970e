"""GET /v1/models: the model, in the form of the API that asks."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pipelines.service.engine_client import ServedModel
from pipelines.service.errors import error_form
from pipelines.service.replies import json_reply
from pipelines.service.service import Service


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    def described(name: str, http: HttpRequest) -> dict[str, Any]:
        kind = error_form(http.url.path, http.headers)
        return (anthropic_model if kind == "anthropic" else openai_model)(service.model, name)

    @router.get("/v1/models", response_model=None)
    async def models(http: HttpRequest) -> Response:
        service.authenticate(http)
        names = [service.model.name, *service.model.aliases]
        listed = [described(name, http) for name in names]
        if error_form(http.url.path, http.headers) == "anthropic":
            return json_reply({"data": listed, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return json_reply({"object": "list", "data": listed})

    # A Hugging Face id has a slash in it.
    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(http: HttpRequest, name: str) -> Response:
        service.authenticate(http)
        service.check_model(name)
        return json_reply(described(name, http))

    return router


def openai_model(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "dflash-ray",
        "max_model_len": model.max_model_len,
    }


def anthropic_model(model: ServedModel, name: str) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created_s))
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": created,
        "max_input_tokens": model.max_model_len - 1,
        "max_tokens": model.max_model_len - 1,
    }
