"""Ollama's `/api/generate` and `/api/chat`, for clients written for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.models.model_manager import ModelManager
from octavo.server.protocols.answer_schemas import (
    OLLAMA_CHAT,
    OLLAMA_TEXT,
    lines_answer,
)
from octavo.server.protocols.answering import answer, read_spec
from octavo.server.protocols.ollama.answer import ChatWriter, GenerateWriter, timestamp
from octavo.server.protocols.ollama.errors import OLLAMA
from octavo.server.protocols.ollama.request import (
    FIELD_NAMES,
    ChatRequest,
    GenerateRequest,
    OllamaRequest,
)
from octavo.server.server_state import state_of

B = TypeVar("B", bound=OllamaRequest)

router = OLLAMA.router(FIELD_NAMES)
IMAGE_PATHS = (
    "/api/generate",
    "/api/chat",
)


@router.post("/api/generate", responses=lines_answer(OLLAMA_TEXT))
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Answer a prompt, as lines of JSON unless `stream` is false. Without a prompt, only load the model."""
    return await _answer(request, body, GenerateWriter, {"response": ""})


@router.post("/api/chat", responses=lines_answer(OLLAMA_CHAT))
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, as lines of JSON unless `stream` is false. Without messages, only load the model."""
    return await _answer(request, body, ChatWriter, {"message": {"role": "assistant", "content": ""}})


async def _answer(request: Request, body: B, writer_class: Callable[..., Any], empty: dict[str, Any]) -> Response:
    models = state_of(request).models
    name = known_name(models, body.model)
    is_stream = body.stream is not False
    at_end = partial(models.unload_soon, name) if body.unloads else None
    if not body.is_empty:
        return await answer(request, body.model_copy(update={"model": name, "stream": is_stream}), writer_class, at_end)
    await read_spec(request, lambda: body.to_spec(""))  # invalid fields are refused here too
    if not body.unloads:
        async with models.use(name):
            pass
    elif at_end is not None:
        at_end()
    reason = "unload" if body.unloads else "load"
    line = {"model": models.shown_name(name), "created_at": timestamp(), **empty, "done": True, "done_reason": reason}
    return JSONResponse(line, media_type="application/x-ndjson" if is_stream else "application/json")


def known_name(models: ModelManager, name: str | None) -> str | None:
    """Return the name without the tag `latest`, which Ollama's clients add. If a model has the full name, return it
    unchanged.
    """
    if name is None or models.knows(name):
        return name
    return name.removesuffix(":latest")
