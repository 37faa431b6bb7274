"""`/v1/messages` and `/v1/messages/count_tokens`, Anthropic's interface: its shapes, its events, its errors."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.generation.prompt import encode_conversation
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.protocols.answer_schemas import MESSAGE, streamed_answer
from octavo.server.protocols.answering import answer, read_spec, tenant_of
from octavo.server.protocols.anthropic.answer import MessagesWriter
from octavo.server.protocols.anthropic.errors import ANTHROPIC
from octavo.server.protocols.anthropic.request import FIELD_NAMES, CountTokensRequest, MessagesRequest
from octavo.server.server_state import state_of

router = ANTHROPIC.router(FIELD_NAMES)


class TokenCount(BaseModel):
    input_tokens: int


@router.post("/v1/messages", responses=streamed_answer(MESSAGE))
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answers a conversation; with `stream` as server-sent events."""
    return await answer(request, body, MessagesWriter)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountTokensRequest) -> TokenCount:
    """The number of tokens in the prompt of this conversation, which may exceed the context."""
    spec = await run_unless_gone(request, read_spec(lambda: body.to_spec(tenant_of(request))))
    async with state_of(request).models.use(body.model) as model:
        token_ids = await run_unless_gone(request, encode_conversation(model, spec))
        return TokenCount(input_tokens=len(token_ids))
