"""`/v1/requests`: cancels a request from outside."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from octavo.server.errors import ApiError
from octavo.server.state import state_of

router = APIRouter(tags=["requests"])


class CancelledRequest(BaseModel):
    """A cancelled request."""

    id: str
    object: str = "request"
    cancelled: bool = True


@router.post("/v1/requests/{request_id}/cancel")
async def cancel_request(request: Request, request_id: str) -> CancelledRequest:
    """Ends a running or waiting request of the same API key, by the id in its header `x-request-id`.

    The cancelled request gets 499 `request_cancelled`, as its status or as the last event of its stream.
    """
    if not state_of(request).admission.cancel(request_id, request.state.tenant):
        raise ApiError(
            404, f"there is no running request {request_id!r:.80}", param="request_id", code="request_not_found"
        )
    return CancelledRequest(id=request_id)
