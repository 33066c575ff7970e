"""Routes for Anthropic's clients."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pipelines.service import anthropic_prompt
from pipelines.service.anthropic_body import MessagesBody, PromptBody
from pipelines.service.anthropic_reply import MessageReply, encode_prompt
from pipelines.service.body import BodyT, parse_body, read_body
from pipelines.service.replies import json_reply
from pipelines.service.request_ids import request_id
from pipelines.service.service import Service
from pipelines.service.watched import Watched


def anthropic_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def body_of(http: HttpRequest, kind: type[BodyT]) -> BodyT:
        # A beta may bring fields that this service has never heard of.
        raw = await read_body(http, service.config.max_body_bytes)
        return parse_body(raw, kind, ignore_unknown="anthropic-beta" in http.headers)

    @router.post("/v1/messages", response_model=None)
    async def messages(http: HttpRequest) -> Response:
        owner = service.authenticate(http)
        body = await body_of(http, MessagesBody)
        service.check_model(body.model)
        return Watched(MessageReply(service, body, owner, request_id(http)).reply)

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(http: HttpRequest) -> Response:
        service.authenticate(http)
        body = await body_of(http, PromptBody)
        service.check_model(body.model)
        anthropic_prompt.check_supported(body, service.model.tokenizer.dialect)
        prompt = await asyncio.to_thread(encode_prompt, body, service.model.tokenizer)
        return json_reply({"input_tokens": len(prompt.tokens)})

    # Claude Code asks these before anything else, without a key.
    @router.api_route("/", methods=["GET", "HEAD"], response_model=None)
    @router.api_route("/api/hello", methods=["GET", "HEAD"], response_model=None)
    async def hello() -> Response:
        return json_reply({"message": "hello"})

    return router
