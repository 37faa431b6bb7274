"""`/v1/responses`: OpenAI's Responses, without storage: every request brings its whole conversation."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.http.route_table import OPENAI
from octavo.server.protocols.answer_schemas import RESPONSE, streamed_answer
from octavo.server.protocols.answering import answer
from octavo.server.protocols.protocol_errors import protocol_route
from octavo.server.protocols.responses import FIELD_NAMES, ResponsesRequest, ResponsesWriter

router = APIRouter(route_class=protocol_route(OPENAI, FIELD_NAMES), tags=["openai"])


@router.post("/responses", include_in_schema=False)
@router.post("/v1/responses", responses=streamed_answer(RESPONSE))
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answers a conversation; with `stream` as typed events."""
    return await answer(request, body, ResponsesWriter)
