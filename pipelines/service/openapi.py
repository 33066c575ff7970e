"""/openapi.json: what the routes take and give, out of the models that read the requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson
from fastapi import APIRouter
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from pipelines.service.anthropic_body import MessagesBody, PromptBody
from pipelines.service.batch_body import BatchBody
from pipelines.service.file_upload import PURPOSES
from pipelines.service.openai_body import ChatBody, TextBody

_MODELS: tuple[type[BaseModel], ...] = (ChatBody, TextBody, MessagesBody, PromptBody, BatchBody)
_JSON, _EVENTS, _TEXT, _HTML = "application/json", "text/event-stream", "text/plain", "text/html"
_BYTES = "application/octet-stream"
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
    },
}


class _Operation(NamedTuple):
    path: str
    method: str
    summary: str
    gives: tuple[str, ...] = (_JSON,)
    body: type[BaseModel] | None = None
    refusals: tuple[int, ...] = (401, 403)
    query: tuple[str, ...] = ()


_ASKING, _ANSWERING = (400, 401, 403, 413), (400, 401, 403, 404, 413, 429, 503)
_LISTING, _FINDING = (400, 401, 403, 404), (401, 403, 404)
_PAGING = ("limit", "after", "order")
_OPERATIONS = (
    _Operation("/", "get", "Page to chat and to watch, or a greeting", (_HTML, _JSON), refusals=()),
    _Operation("/api/hello", "get", "A greeting", refusals=()),
    _Operation("/health", "get", "Whether requests are answered", refusals=(503,)),
    _Operation("/openapi.json", "get", "This document", refusals=()),
    _Operation("/live", "get", "Figures of now"),
    _Operation("/metrics", "get", "Figures for Prometheus", (_TEXT,)),
    _Operation("/v1/models", "get", "The model, under each of its names"),
    _Operation("/v1/models/{name}", "get", "The model, under one name", refusals=_FINDING),
    _Operation(
        "/v1/chat/completions", "post", "OpenAI: answer to a chat", (_JSON, _EVENTS), ChatBody, _ANSWERING
    ),
    _Operation(
        "/v1/completions", "post", "OpenAI: end of a text", (_JSON, _EVENTS), TextBody, _ANSWERING
    ),
    _Operation(
        "/v1/messages", "post", "Anthropic: answer to a chat", (_JSON, _EVENTS), MessagesBody, _ANSWERING
    ),
    _Operation(
        "/v1/messages/count_tokens", "post", "Anthropic: length of a prompt", body=PromptBody,
        refusals=(*_ASKING, 404),
    ),
    _Operation("/v1/files", "post", "Upload a batch's input", refusals=(*_ASKING, 404)),
    _Operation("/v1/files", "get", "Files", refusals=_LISTING, query=(*_PAGING, "purpose")),
    _Operation("/v1/files/{file_id}", "get", "A file's description", refusals=_FINDING),
    _Operation("/v1/files/{file_id}", "delete", "Delete a file", refusals=_FINDING),
    _Operation("/v1/files/{file_id}/content", "get", "A file's bytes", (_BYTES,), refusals=_FINDING),
    _Operation("/v1/batches", "post", "Begin a batch", body=BatchBody, refusals=(*_ASKING, 404)),
    _Operation("/v1/batches", "get", "Batches", refusals=_LISTING, query=_PAGING),
    _Operation("/v1/batches/{batch_id}", "get", "A batch", refusals=_FINDING),
    _Operation("/v1/batches/{batch_id}/cancel", "post", "Cancel a batch", refusals=(400, *_FINDING)),
)  # fmt: skip


def openapi_router() -> APIRouter:
    raw = orjson.dumps(document())
    router = APIRouter()

    @router.get("/openapi.json", response_model=None)
    async def described() -> Response:
        return Response(raw, media_type=_JSON)

    return router


def document() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dflash-ray",
            "version": "1",
            "description": "Where the service has a file of keys, each request needs one.",
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
        "paths": paths,
        "components": {
            "schemas": {
                **_strict(schemas["$defs"]),
                "OpenAIError": _OPENAI_ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _described(operation: _Operation) -> dict[str, Any]:
    error = "AnthropicError" if operation.path.startswith("/v1/messages") else "OpenAIError"
    refused = {"description": "Refused, with the reason", "content": _content([_JSON], _ref(error))}
    unwell = {"description": "Not now", "content": _content([_JSON], {"type": "object"})}
    answers: dict[str, Any] = {"200": {"description": "Answered", "content": _content(operation.gives)}}
    for status in operation.refusals:
        answers[str(status)] = unwell if operation.path == "/health" else refused
    made: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [_parameter(name, "path") for name in names]
    parameters += [_parameter(name, "query") for name in operation.query]
    if parameters:
        made["parameters"] = parameters
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": _content([_JSON], _ref(operation.body.__name__))}
    elif (operation.path, operation.method) == ("/v1/files", "post"):
        made["requestBody"] = {"required": True, "content": _content(["multipart/form-data"], _UPLOAD)}
    return made


def _parameter(name: str, place: str) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "limit": {"type": "integer", "minimum": 1},
        "order": {"type": "string", "enum": ["asc", "desc"]},
    }
    schema = kinds.get(name, {"type": "string", "minLength": 1})
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _content(kinds: Iterable[str], schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {kind: {"schema": schema} if schema is not None else {} for kind in kinds}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _strict(schemas: Mapping[str, Any]) -> dict[str, Any]:
    """The models keep fields that they do not know only to name them in the refusal."""
    return {name: {**schema, "additionalProperties": False} for name, schema in schemas.items()}


def _object(required: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": dict(required)}


_WORDS = {"type": "string"}
_MAYBE = {"type": ["string", "null"]}
_OPENAI_ERROR = _object(
    {"error": _object({"message": _WORDS, "type": _WORDS, "param": _MAYBE, "code": _MAYBE})}
)
_ANTHROPIC_ERROR = _object(
    {"type": {"const": "error"}, "error": _object({"type": _WORDS, "message": _WORDS}), "request_id": _MAYBE}
)
