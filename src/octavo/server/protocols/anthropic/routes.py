"""`/v1/messages` and `/v1/messages/count_tokens`, Anthropic's API with its formats, events and errors."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.http.access_log import record_of
from octavo.server.protocols.answer_schemas import MESSAGE, streamed_answer
from octavo.server.protocols.answering import answer, count_prompt_tokens, name_ignored
from octavo.server.protocols.anthropic.answer import MessagesWriter
from octavo.server.protocols.anthropic.errors import ANTHROPIC
from octavo.server.protocols.anthropic.request import FIELD_NAMES, CountTokensRequest, MessagesRequest

router = ANTHROPIC.router(FIELD_NAMES)
IMAGE_PATHS = (
    "/v1/messages",
    "/v1/messages/count_tokens",
)


class TokenCount(BaseModel):
    input_tokens: int


@router.post("/v1/messages", responses=streamed_answer(MESSAGE))
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation, with server-sent events if `stream` is set."""
    return await answer(request, body, MessagesWriter)


@router.post("/v1/messages/count_tokens", response_model=TokenCount)
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """Return the number of tokens in this conversation's prompt, which may exceed the context."""
    count = JSONResponse({"input_tokens": await count_prompt_tokens(request, body)})
    return name_ignored(body.find_ignored(), record_of(request), count)
