"""`/invocations` and `/ping`: Amazon SageMaker's names for the OpenAI routes and the health check, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import UsageError
from octavo.server.endpoints.health import HealthStatus, ready
from octavo.server.http.json_body import RequestModel, parse_object, to_bad_request
from octavo.server.protocols.openai import embedding_routes, routes
from octavo.server.protocols.openai.chat_request import ChatCompletionRequest
from octavo.server.protocols.openai.completion_request import CompletionRequest
from octavo.server.protocols.protocol import rename_fields

router = APIRouter(tags=["SageMaker"])

# The field that distinguishes the kinds of body, and each kind's model and endpoint.
_KINDS: dict[str, tuple[type[RequestModel], Callable[[Request, Any], Coroutine[Any, Any, Response]]]] = {
    "messages": (ChatCompletionRequest, routes.create_chat_completion),
    "prompt": (CompletionRequest, routes.create_completion),
    "input": (embedding_routes.EmbeddingsRequest, embedding_routes.create_embeddings),
}


@router.post("/invocations", response_model=None)
async def invoke(request: Request) -> Response:
    """Answer a chat (`messages`), a text completion (`prompt`) or an embeddings request (`input`), depending on the
    body's fields.
    """
    body = parse_object(request.scope["state"].pop("body"))
    kind = next((name for name in _KINDS if name in body), None)
    if kind is None:
        message = f"the body must have one of {', '.join(_KINDS)}"
        raise UsageError(message, param="messages", code="missing_required_parameter")
    model, endpoint = _KINDS[kind]
    try:
        read = model.model_validate(body)
    except ValidationError as error:
        raise to_bad_request(error.errors(), body) from None
    try:
        return await endpoint(request, read)
    except UsageError as error:
        raise rename_fields(error, embedding_routes.FIELD_NAMES if kind == "input" else {}) from None


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> HealthStatus:
    """Answer like `/health/ready`."""
    return await ready(request)
