"""`/v1/files` and `/v1/batches`. Each API key can only find its own files and batches."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from octavo.batches.store import FILE_S, StoredBatch, StoredFile
from octavo.server.errors import ApiError, bad_request
from octavo.server.http.json_body import quote
from octavo.server.protocols.answering import tenant_of
from octavo.server.protocols.batches.answer import batch_body, file_body, list_body
from octavo.server.protocols.batches.errors import BATCHES
from octavo.server.protocols.batches.request import BatchRequest, Upload, kept_s
from octavo.server.server_state import state_of

router = BATCHES.router()
BODILESS_PATHS = ("/v1/files",)  # an upload is read as it arrives
_PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
_MAX_FILES_SHOWN, _MAX_BATCHES_SHOWN = 10_000, 100


@router.post("/v1/files")
async def upload_file(request: Request) -> Response:
    """Store a file uploaded in a form, with its `purpose`."""
    batches, owner = state_of(request).batches, tenant_of(request)
    upload = Upload(path := await batches.use(lambda store: store.new_upload()))
    try:
        await upload.receive(request)
        purpose = upload.fields.get("purpose", "")
        if purpose not in _PURPOSES:
            message = f"purpose is {quote(purpose, 40)}; it must be one of {', '.join(_PURPOSES)}"
            raise bad_request(message, "purpose")
        seconds = kept_s(upload.fields, FILE_S if purpose == "batch" else None)
        file = await batches.use(lambda store: store.add_file(owner, path, purpose, upload.filename, seconds))
    finally:
        path.unlink(missing_ok=True)
    return JSONResponse(file_body(file))


@router.get("/v1/files")
async def list_files(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_FILES_SHOWN)] = _MAX_FILES_SHOWN,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Response:
    owner = tenant_of(request)
    found = await state_of(request).batches.use(
        lambda store: store.files(owner, after=after, limit=limit + 1, is_newest_first=order == "desc", purpose=purpose)
    )
    return JSONResponse(list_body([file_body(file) for file in found[:limit]], len(found) > limit))


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> Response:
    return JSONResponse(file_body(await _file(request, file_id)))


@router.get("/v1/files/{file_id}/content")
async def file_content(request: Request, file_id: str) -> Response:
    file = await _file(request, file_id)
    path = await state_of(request).batches.use(lambda store: store.content_of(file.id))
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    owner = tenant_of(request)
    if not await state_of(request).batches.use(lambda store: store.delete_file(owner, file_id)):
        raise _absent("file", file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


@router.post("/v1/batches")
async def create_batch(request: Request, body: BatchRequest) -> Response:
    """Queue a batch made of the lines of a file."""
    file = await _file(request, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        message = f"the file {file.id} has the purpose {file.purpose}; upload it with the purpose batch"
        raise bad_request(message, "input_file_id")
    batch = body.to_batch(tenant_of(request))
    await state_of(request).batches.add(batch)
    return JSONResponse(batch_body(batch))


@router.get("/v1/batches")
async def list_batches(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_BATCHES_SHOWN)] = 20,
) -> Response:
    found = await state_of(request).batches.batches(tenant_of(request), after, limit + 1)
    return JSONResponse(list_body([batch_body(batch) for batch in found[:limit]], len(found) > limit))


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    return JSONResponse(batch_body(await _batch(request, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """End a batch early. Existing results are kept."""
    batch = await _batch(request, batch_id)
    if batch.has_ended and batch.status != "cancelled":
        raise ApiError(409, f"the batch is {batch.status}; it cannot be cancelled", code="batch_has_ended")
    return JSONResponse(batch_body(await state_of(request).batches.cancel(batch)))


async def _file(request: Request, file_id: str, param: str | None = None) -> StoredFile:
    owner = tenant_of(request)
    file = await state_of(request).batches.use(lambda store: store.file(owner, file_id))
    if file is None:
        raise _absent("file", file_id, param)
    return file


async def _batch(request: Request, batch_id: str) -> StoredBatch:
    batch = await state_of(request).batches.find(tenant_of(request), batch_id)
    if batch is None:
        raise _absent("batch", batch_id)
    return batch


def _absent(kind: str, name: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"there is no {kind} {quote(name, 80)}", param=param, code="not_found")
