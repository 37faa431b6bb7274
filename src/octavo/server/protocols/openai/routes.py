"""`POST /v1/chat/completions` and `/v1/completions`, in OpenAI's formats with vLLM's additions.

OpenAI's paths are also served without `/v1`, for clients whose base URL lacks it.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.protocols.answer_schemas import CHAT_COMPLETION, COMPLETION, streamed_answer
from octavo.server.protocols.answering import InputTokens, answer, count_prompt_tokens
from octavo.server.protocols.openai.answer import ChatWriter, CompletionWriter
from octavo.server.protocols.openai.chat_request import ChatCompletionRequest
from octavo.server.protocols.openai.completion_request import CompletionRequest
from octavo.server.protocols.openai.errors import OPENAI

router = OPENAI.router()
IMAGE_PATHS = (
    "/v1/chat/completions",
    "/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/chat/completions/input_tokens",
    "/input_tokens",
)


@router.post("/chat/completions", include_in_schema=False)
@router.post("/v1/chat/completions", responses=streamed_answer(CHAT_COMPLETION))
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, with server-sent events if `stream` is set."""
    return await answer(request, body, ChatWriter)


@router.post("/input_tokens", include_in_schema=False)
@router.post("/chat/completions/input_tokens", include_in_schema=False)
@router.post("/v1/chat/completions/input_tokens")
async def count_chat_tokens(request: Request, body: ChatCompletionRequest) -> InputTokens:
    """Return the number of tokens in this conversation's prompt, which may exceed the context. This route is from
    llama.cpp.
    """
    return InputTokens(input_tokens=await count_prompt_tokens(request, body))


@router.post("/completions", include_in_schema=False)
@router.post("/v1/completions", responses=streamed_answer(COMPLETION))
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue texts, with server-sent events if `stream` is set. `max_tokens: 0` with `echo` and `logprobs` scores
    them.
    """
    return await answer(request, body, CompletionWriter)
