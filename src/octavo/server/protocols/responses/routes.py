"""`/v1/responses`: OpenAI's Responses, stored so that later requests can continue, fetch or delete them."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn

from anyio.to_thread import run_sync
from fastapi import Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message

from octavo.server.errors import ApiError, refuse, to_api_error
from octavo.server.event_log import EventLog
from octavo.server.generation.json_schema import MAX_EXACT_NUMBER
from octavo.server.http.access_log import record_of
from octavo.server.http.long_answer import EVENTS, EventStream, run_unless_gone
from octavo.server.protocols.answer_schemas import COMPACTION, RESPONSE, streamed_answer, whole_answer
from octavo.server.protocols.answering import (
    InputTokens,
    answer,
    count_prompt_tokens,
    ignored_names,
    name_ignored,
    off_loop,
    tenant_of,
)
from octavo.server.protocols.responses.answer import ResponsesWriter
from octavo.server.protocols.responses.compaction import CompactionWriter, CompactRequest
from octavo.server.protocols.responses.errors import RESPONSES
from octavo.server.protocols.responses.request import FIELD_NAMES, F, ResponsesRequest
from octavo.server.protocols.responses.stored_items import read_items, stored_items
from octavo.server.response_store import BackgroundRun, StoredResponse
from octavo.server.server_state import state_of

router = RESPONSES.router(FIELD_NAMES)
IMAGE_PATHS = (
    "/v1/responses",
    "/responses",
    "/v1/responses/input_tokens",
    "/responses/input_tokens",
    "/v1/responses/compact",
    "/responses/compact",
)


class DeletedResponse(BaseModel):
    """Confirmation that a response is no longer stored."""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(BaseModel):
    """One page of the items that a response answers."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.post("/responses", include_in_schema=False)
@router.post("/v1/responses", responses=streamed_answer(RESPONSE))
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation, with typed events if `stream` is set. With `background`, respond before the answer is
    ready.
    """
    store, owner = state_of(request).responses, tenant_of(request)
    body = await _with_history(request, body)
    items = await off_loop(request, lambda: stored_items(body.all_items)) if body.is_stored else []
    written: asyncio.Future[ResponsesWriter] = asyncio.get_running_loop().create_future()

    def make_writer(*parts: Any) -> ResponsesWriter:
        writer = ResponsesWriter(*parts)
        if body.is_stored:
            writer.save = lambda response: store.put(owner, StoredResponse(response, items))
        written.set_result(writer)
        return writer

    if not body.background:
        return await answer(request, body, make_writer)
    log = EventLog() if body.stream else None
    task = asyncio.create_task(_make(Request(request.scope, _never_gone), body, make_writer, written, log))
    try:
        waits: set[asyncio.Future[Any]] = {task, written}
        await run_unless_gone(request, asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))
    except BaseException:
        task.cancel()
        raise
    if not written.done():
        task.result()  # raises the reason
    writer = written.result()
    response = writer.body()
    if not task.done():
        store.running[response["id"]] = BackgroundRun(owner, writer.body, items, task)
        task.add_done_callback(lambda _: store.running.pop(response["id"]))
    ignored = ignored_names(body, writer.generation)
    if log is None:
        return name_ignored(ignored, record_of(request), JSONResponse(response))
    store.logs.put(response["id"], log)
    return name_ignored(ignored, record_of(request), _stream(request, log, 0))


@router.post("/responses/input_tokens", include_in_schema=False)
@router.post("/v1/responses/input_tokens", response_model=InputTokens)
async def count_input_tokens(request: Request, body: ResponsesRequest) -> Response:
    """Return the number of tokens in this conversation's prompt, which may exceed the context."""
    body = await _with_history(request, body)
    count = InputTokens(input_tokens=await count_prompt_tokens(request, body))
    return name_ignored(body.find_ignored(), record_of(request), JSONResponse(count.model_dump()))


@router.post("/responses/compact", include_in_schema=False)
@router.post("/v1/responses/compact", responses=whole_answer(COMPACTION))
async def compact(request: Request, body: CompactRequest) -> Response:
    """Return a conversation's user messages, and a summary of it that only this server can read."""
    return await answer(request, await _with_history(request, body), CompactionWriter)


async def _with_history(request: Request, body: F) -> F:
    """Return the body preceded by the response that it continues. Raises UsageError if there is no such response."""
    if (previous := body.previous_response_id) is None:
        return body
    stored = await state_of(request).responses.get(tenant_of(request), previous)
    if stored is None:
        reason = f"is {previous[:80]!r}, but this API key has no such stored response"
        raise refuse("previous_response_id", reason, "previous_response_not_found")
    if (status := stored.response["status"]) not in ("completed", "incomplete"):
        raise refuse("previous_response_id", f"names a response that is {status}", "invalid_value")
    earlier = [*stored.input_items, *stored.response["output"]]
    return body.continuing(await run_sync(read_items, earlier))


async def _never_gone() -> NoReturn:
    """Wait forever, like a client that never disconnects."""
    await asyncio.Event().wait()
    raise AssertionError


async def _make(
    request: Request,
    body: ResponsesRequest,
    make_writer: Callable[..., ResponsesWriter],
    written: asyncio.Future[ResponsesWriter],
    log: EventLog | None,
) -> None:
    """Make a response in the background, and store its final state whatever it is. Raises errors that occur before it
    begins.

    log: receives the events if the response is streamed
    """

    async def send(message: Message) -> None:
        if log is not None:
            log.add(message.get("body", b""))

    try:
        made = await answer(request, body, make_writer)
        if log is not None:
            await made({**request.scope, "state": {}}, request.receive, send)
    except asyncio.CancelledError:
        if written.done():
            written.result().cancel()
        raise
    except Exception as error:
        if not written.done():
            raise
        deque(written.result().fail(to_api_error(error, record_of(request).request_id)), maxlen=0)
    finally:
        if log is not None:
            log.end()


def _stream(request: Request, log: EventLog, first: int) -> EventStream:
    """Stream a background response's events from number `first` on. The response continues without the client."""

    def fail(error: ApiError) -> bytes:
        return EVENTS.encode(
            json.dumps(RESPONSES.dialect.error_body(error, record_of(request).request_id)).encode(), "error"
        )

    return EventStream(request, log.read(first), on_error=fail)


@router.get("/responses/{response_id}", include_in_schema=False)
@router.get("/v1/responses/{response_id}", responses=streamed_answer(RESPONSE))
async def get_response(
    request: Request,
    response_id: str,
    stream: Literal["true", "false"] = "false",
    starting_after: Annotated[int, Query(ge=-1, le=MAX_EXACT_NUMBER)] | None = None,
) -> Response:
    """Return a stored response, even one that is still being made in the background.

    stream: return its events, if it was made in the background with `stream`
    starting_after: return only events after this number
    """
    stored = await _find(request, response_id)
    if stream == "false":
        if starting_after is not None:
            raise refuse("starting_after", "needs stream=true", "invalid_value")
        return JSONResponse(stored.response)
    log = state_of(request).responses.logs.get(response_id)
    if log is None:
        reason = "needs a response made with background and stream, because only their events are kept; fetch it whole"
        raise refuse("stream", reason, "invalid_value")
    return _stream(request, log, 0 if starting_after is None else starting_after + 1)


@router.delete("/responses/{response_id}", include_in_schema=False)
@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    """Remove a stored response. If it is still being made, it is cancelled."""
    store, owner = state_of(request).responses, tenant_of(request)
    run = store.running.get(response_id)
    if run is not None and run.owner == owner:
        await run.cancel()
    if not await store.delete(owner, response_id):
        raise _not_found(response_id)
    store.logs.remove(response_id)
    return DeletedResponse(id=response_id)


@router.post("/responses/{response_id}/cancel", include_in_schema=False)
@router.post("/v1/responses/{response_id}/cancel", response_class=JSONResponse)
async def cancel_response(request: Request, response_id: str) -> JSONResponse:
    """End a background response. One that has already ended is not changed."""
    stored = await _find(request, response_id)
    if not stored.response["background"]:
        raise refuse("response_id", "names a response that was not made in the background", "invalid_value")
    if (run := state_of(request).responses.running.get(response_id)) is not None:
        await run.cancel()
        stored = await _find(request, response_id)
    return JSONResponse(stored.response)


@router.get("/responses/{response_id}/input_items", include_in_schema=False)
@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> ItemList:
    """List the items that a response answers, including the items of earlier responses."""
    items = (await _find(request, response_id)).input_items
    items = items if order == "asc" else items[::-1]
    if after is not None:
        position = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if position is None:
            raise refuse("after", f"is {after[:80]!r}, but this response has no such item", "invalid_value")
        items = items[position + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(data=page, first_id=first, last_id=last, has_more=len(items) > limit)


async def _find(request: Request, response_id: str) -> StoredResponse:
    """Return a response of this API key. Raises ApiError 404."""
    stored = await state_of(request).responses.get(tenant_of(request), response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> ApiError:
    message = f"there is no stored response {response_id[:80]!r} of this API key"
    return ApiError(404, message, param="response_id", code="response_not_found")
