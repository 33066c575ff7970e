"""/v1/files: each owner's own, as OpenAI's clients use them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from pipelines.service.batches import Batches
from pipelines.service.errors import ApiError
from pipelines.service.file_store import FileRecord
from pipelines.service.file_upload import receive_file
from pipelines.service.list_reply import list_reply, page_asked
from pipelines.service.owner_folder import OwnerFolder, owner_folder
from pipelines.service.replies import json_reply
from pipelines.service.service import Service

MAX_LIST = 10_000


def file_router(service: Service, batches: Batches | None) -> APIRouter:
    router = APIRouter()

    entered = entrance(service, batches)

    @router.post("/v1/files", response_model=None)
    async def create(http: HttpRequest) -> Response:
        owner, here = entered(http)
        record = await receive_file(http, owner, here.files, here.settings.max_file_bytes)
        return json_reply(record.as_json())

    @router.get("/v1/files", response_model=None)
    async def listed(http: HttpRequest) -> Response:
        owner, here = entered(http)
        asked = page_asked(http, MAX_LIST, MAX_LIST)
        page = await asyncio.to_thread(here.files.page, owner, asked, http.query_params.get("purpose"))
        return list_reply([record.as_json() for record in page.items], has_more=page.has_more)

    @router.get("/v1/files/{file_id}", response_model=None)
    async def retrieve(http: HttpRequest, file_id: str) -> Response:
        owner, here = entered(http)
        return json_reply((await found(here, owner, file_id)).as_json())

    @router.get("/v1/files/{file_id}/content", response_model=None)
    async def content(http: HttpRequest, file_id: str) -> Response:
        owner, here = entered(http)
        record = await found(here, owner, file_id)
        name = re.sub(r"[^\w.\-]", "_", record.filename, flags=re.ASCII)
        headers = {
            "content-length": str(record.bytes),
            "content-disposition": f'attachment; filename="{name}"',
            # What was uploaded is nobody's web page.
            "x-content-type-options": "nosniff",
        }
        blocks = here.files.blocks(owner, record)
        return StreamingResponse(blocks, headers=headers, media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}", response_model=None)
    async def delete(http: HttpRequest, file_id: str) -> Response:
        owner, here = entered(http)
        await found(here, owner, file_id)
        await asyncio.to_thread(here.files.delete, owner, file_id)
        return json_reply({"id": file_id, "object": "file", "deleted": True})

    return router


def entrance(
    service: Service, batches: Batches | None
) -> Callable[[HttpRequest], tuple[OwnerFolder, Batches]]:
    """Whose folder a request may use, and where. Raises `ApiError`: 401 without a key that is known, 404
    where the service has no place for files."""

    def entered(http: HttpRequest) -> tuple[OwnerFolder, Batches]:
        owner = service.authenticate(http)
        if batches is None:
            raise ApiError(
                404,
                "this service keeps no files and runs no batches: its config has no section batches",
                code="batches_not_configured",
            )
        return owner_folder(owner.name), batches

    return entered


async def found(here: Batches, owner: OwnerFolder, file_id: str) -> FileRecord:
    """Raises `ApiError` 404, for another owner's file as for none."""
    record = await asyncio.to_thread(here.files.find, owner, file_id)
    if record is None:
        raise ApiError(404, f"no such file: {file_id[:100]}", param="id", code="file_not_found")
    return record
