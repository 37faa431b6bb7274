"""`/v1/responses`: OpenAI's Responses, without storage: every request brings its whole conversation."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.generation.run import start_chat
from octavo.server.generation.spec import Generation
from octavo.server.http.dialects import OPENAI
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answer_schemas import RESPONSE, streamed_answer
from octavo.server.protocols.answering import AnswerWriter, answer, tenant_of
from octavo.server.protocols.protocol_errors import protocol_route, request_id_of
from octavo.server.protocols.responses_answer import ResponsesWriter
from octavo.server.protocols.responses_request import FIELD_NAMES, ResponsesRequest, to_chat_spec
from octavo.server.state import state_of

router = APIRouter(route_class=protocol_route(OPENAI, FIELD_NAMES), tags=["openai"])


@router.post("/v1/responses", responses=streamed_answer(RESPONSE))
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answers a conversation; with `stream` as typed events."""

    async def start(model: ServedModel) -> tuple[Generation, AnswerWriter]:
        spec = to_chat_spec(body, model, tenant_of(request))
        generation = await start_chat(state_of(request), model, spec, request_id_of(request))
        return generation, ResponsesWriter(body, model, generation.num_truncated_tokens)

    return await answer(request, body.model, start, stream=bool(body.stream))
