"""`POST /v1/chat/completions`: answers to conversations in OpenAI's shapes, with vLLM's additions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.http.json_body import JsonRoute
from octavo.server.protocols.answer_schemas import CHAT_COMPLETION, streamed_answer
from octavo.server.protocols.answering import answer
from octavo.server.protocols.chat_request import ChatCompletionRequest
from octavo.server.protocols.openai_answer import ChatWriter

router = APIRouter(route_class=JsonRoute, tags=["openai"])


@router.post("/v1/chat/completions", responses=streamed_answer(CHAT_COMPLETION))
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answers a conversation; with `stream` in server-sent events."""
    return await answer(request, body, ChatWriter)
