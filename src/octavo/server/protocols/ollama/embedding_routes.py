"""Ollama's `/api/embed` and `/api/embeddings`: text embeddings."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.generation.spec import read_options
from octavo.server.http.access_log import record_of
from octavo.server.http.json_body import Int, Text
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.protocols.answer_schemas import (
    OLLAMA_EMBEDDING,
    OLLAMA_EMBEDDINGS,
    whole_answer,
)
from octavo.server.protocols.answering import name_ignored
from octavo.server.protocols.embedding import (
    MAX_INPUTS,
    Embedded,
    EmbeddingJob,
    check_dimensions,
    embed_inputs,
    unit_vector,
    vectors_response,
)
from octavo.server.protocols.ollama.answer import nanoseconds
from octavo.server.protocols.ollama.errors import OLLAMA
from octavo.server.protocols.ollama.request import KeepAlive, Options, find_ignored_options
from octavo.server.protocols.ollama.routes import known_name
from octavo.server.protocols.protocol_fields import OptionFields
from octavo.server.server_state import state_of

router = OLLAMA.router({"prompt": "input"})


class EmbedRequest(OptionFields):
    """Texts to embed.

    input: nothing, an empty text or an empty list gives no vectors
    truncate: whether to cut off the end of an input beyond the context; true by default
    """

    model: Text | None = None
    input: Text | Annotated[list[Text], Field(max_length=MAX_INPUTS)] | None = None
    truncate: bool | None = None
    dimensions: Int | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class EmbeddingsRequest(OptionFields):
    """The older request format, for one text."""

    model: Text | None = None
    prompt: Text
    options: Options | None = None
    keep_alive: KeepAlive | None = None


@router.post("/api/embed", responses=whole_answer(OLLAMA_EMBEDDINGS))
async def create_embeddings(request: Request, body: EmbedRequest) -> Response:
    """Return one vector of length 1 for each input."""
    inputs = [body.input] if isinstance(body.input, str) and body.input else body.input or []
    truncate_to = None if body.truncate is False else -1
    return await _embed(request, body, EmbeddingJob(inputs, read_options(body), None, truncate_to, "right"))


@router.post("/api/embeddings", responses=whole_answer(OLLAMA_EMBEDDING))
async def create_embedding(request: Request, body: EmbeddingsRequest) -> Response:
    """Return the vector of one text, not normalised."""
    return await _embed(request, body, EmbeddingJob([body.prompt], read_options(body), None, -1, "right"))


async def _embed(request: Request, body: EmbedRequest | EmbeddingsRequest, job: EmbeddingJob) -> Response:
    models, record = state_of(request).models, record_of(request)
    ignored = find_ignored_options(body.options, body.keep_alive)
    if body.options is not None:
        body.options.read_sampling("options.")  # sampling has no effect here, but invalid values are still refused
    began_s = time.monotonic()
    async with models.use(known_name(models, body.model)) as model:
        load_s = time.monotonic() - began_s
        if isinstance(body, EmbedRequest):
            check_dimensions(body.dimensions, model)
        found = Embedded([], 0, 0)
        if job.inputs:
            found = await run_unless_gone(request, embed_inputs(request, model, job))
        if isinstance(body, EmbeddingsRequest):
            response: Response = JSONResponse({"embedding": list(map(float, found.vectors[0]))})
        else:
            head = {
                "model": model.name,
                "total_duration": nanoseconds(time.monotonic() - record.began_s),
                "load_duration": nanoseconds(load_s),
                "prompt_eval_count": found.num_tokens,
            }
            response = await vectors_response(
                found.vectors, lambda _, vector: list(map(float, unit_vector(vector))), head, "embeddings"
            )
        return name_ignored(ignored, record, response)
