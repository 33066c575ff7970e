"""Routes for OpenAI's clients."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pipelines.service.body import parse_body, read_body
from pipelines.service.openai_body import ChatBody, TextBody
from pipelines.service.openai_chat_reply import ChatReply
from pipelines.service.openai_text_reply import TextReply
from pipelines.service.request_ids import request_id
from pipelines.service.service import Service
from pipelines.service.watched import Watched


def openai_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(http: HttpRequest) -> Response:
        owner = service.authenticate(http)
        body = parse_body(await read_body(http, service.config.max_body_bytes), ChatBody)
        service.check_model(body.model)
        return Watched(ChatReply(service, body, owner, request_id(http)).reply)

    @router.post("/v1/completions", response_model=None)
    async def completions(http: HttpRequest) -> Response:
        owner = service.authenticate(http)
        body = parse_body(await read_body(http, service.config.max_body_bytes), TextBody)
        service.check_model(body.model)
        return Watched(TextReply(service, body, owner, request_id(http)).reply)

    return router
