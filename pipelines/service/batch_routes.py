"""/v1/batches: each owner's own, as OpenAI's clients use them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pipelines.service.batch import CANCELLABLE, Batch
from pipelines.service.batch_body import BatchBody
from pipelines.service.batch_store import BatchKey
from pipelines.service.batches import Batches
from pipelines.service.body import parse_body, read_body
from pipelines.service.errors import ApiError, invalid
from pipelines.service.file_routes import entrance
from pipelines.service.file_upload import checked_expiry
from pipelines.service.list_reply import list_reply, page_asked
from pipelines.service.owner_folder import OwnerFolder
from pipelines.service.replies import json_reply
from pipelines.service.service import Service

DEFAULT_LIST, MAX_LIST = 20, 100


def batch_router(service: Service, batches: Batches | None) -> APIRouter:
    router = APIRouter()

    entered = entrance(service, batches)

    @router.post("/v1/batches", response_model=None)
    async def create(http: HttpRequest) -> Response:
        owner, here = entered(http)
        body = parse_body(await read_body(http, service.config.max_body_bytes), BatchBody)
        return json_reply((await _create(here, owner, body, service.model.name)).as_json())

    @router.get("/v1/batches", response_model=None)
    async def listed(http: HttpRequest) -> Response:
        owner, here = entered(http)
        page = await asyncio.to_thread(here.batches.page, owner, page_asked(http, DEFAULT_LIST, MAX_LIST))
        return list_reply([batch.as_json() for batch in page.items], has_more=page.has_more)

    @router.get("/v1/batches/{batch_id}", response_model=None)
    async def retrieve(http: HttpRequest, batch_id: str) -> Response:
        owner, here = entered(http)
        return json_reply((await _found(here, BatchKey(owner, batch_id))).as_json())

    @router.post("/v1/batches/{batch_id}/cancel", response_model=None)
    async def cancel(http: HttpRequest, batch_id: str) -> Response:
        owner, here = entered(http)
        key = BatchKey(owner, batch_id)
        await _found(here, key)
        return json_reply((await _cancel(here, key)).as_json())

    return router


async def _create(here: Batches, owner: OwnerFolder, body: BatchBody, model: str) -> Batch:
    """Raises `ApiError` 400."""
    expires = body.output_expires_after
    expires_s = expires and checked_expiry(expires.anchor, expires.seconds, "output_expires_after")
    source = await asyncio.to_thread(here.files.find, owner, body.input_file_id)
    if source is None or source.purpose != "batch":
        problem = "no such file" if source is None else f"its purpose is {source.purpose}, not batch"
        name = body.input_file_id[:100]
        raise invalid(f"input_file_id: {name}: {problem}", "input_file_id", "invalid_input_file")
    now, key = int(here.clock()), here.batches.new_key(owner)
    batch = Batch(
        id=key.id,
        endpoint=body.endpoint,
        input_file_id=source.id,
        completion_window=body.completion_window,
        model=model,
        created_at=now,
        expires_at=now + here.settings.window_s,
        metadata=body.metadata,
        output_expires_after_s=expires_s,
    )
    await asyncio.to_thread(here.batches.create, key, batch)
    here.bell.ring()
    return batch


async def _cancel(here: Batches, key: BatchKey) -> Batch:
    """The batch, on its way to be cancelled. Raises `ApiError` 400 where it is too late."""
    now = here.clock()

    def cancelled(batch: Batch) -> Batch:
        can = batch.status in CANCELLABLE and batch.ending is None
        return batch.at("cancelling", now) if can else batch

    batch = await asyncio.to_thread(here.batches.update, key, cancelled)
    here.bell.ring()
    if batch.status not in ("cancelling", "cancelled"):
        raise invalid(f"a batch that is {batch.status} cannot be cancelled", code="batch_not_cancellable")
    return batch


async def _found(here: Batches, key: BatchKey) -> Batch:
    """Raises `ApiError` 404, for another owner's batch as for none."""
    batch = await asyncio.to_thread(here.batches.find, key)
    if batch is None:
        raise ApiError(404, f"no such batch: {key.id[:100]}", param="id", code="batch_not_found")
    return batch
