"""Text Embeddings Inference's `/embed`, which answers texts with a list of vectors."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.errors import refuse
from octavo.server.generation.spec import read_options
from octavo.server.http.json_body import Int, Text
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.protocols.answer_schemas import TEI_EMBEDDINGS, whole_answer
from octavo.server.protocols.embedding import (
    EmbeddingJob,
    Input,
    check_dimensions,
    embed_inputs,
    list_of_inputs,
    unit_vector,
    vectors_response,
)
from octavo.server.protocols.protocol_fields import OptionFields
from octavo.server.protocols.tgi.errors import TGI
from octavo.server.server_state import state_of

router = TGI.router({"prompt": "inputs", "truncate_prompt_tokens": "truncate"})


class VectorsRequest(OptionFields):
    """Texts to embed.

    truncate: whether to cut off the end of an input beyond the context, or its beginning if truncation_direction is
    left
    normalize: whether to scale vectors to length 1; true by default
    prompt_name: refused, because this server does not read the prompts of sentence-transformers
    dimensions: only the model's own number is accepted
    model: an addition, for servers with several models
    """

    model: Text | None = None
    inputs: Input
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    normalize: bool | None = None
    prompt_name: Text | None = None
    dimensions: Int | None = None


@router.post("/embed", responses=whole_answer(TEI_EMBEDDINGS))
async def create_vectors(request: Request, body: VectorsRequest) -> Response:
    """Return the vector of each input."""
    if body.prompt_name is not None:
        raise refuse("prompt_name", "names a prompt, but this server has no prompts; put its text before each input")
    truncate_to = -1 if body.truncate else None
    side: Literal["left", "right"] = "left" if body.truncation_direction in ("Left", "left") else "right"
    async with state_of(request).models.use(body.model) as model:
        check_dimensions(body.dimensions, model)
        job = EmbeddingJob(list_of_inputs(body.inputs), read_options(body), None, truncate_to, side)
        found = await run_unless_gone(request, embed_inputs(request, model, job))
    is_raw = body.normalize is False
    return await vectors_response(
        found.vectors, lambda _, vector: list(map(float, vector if is_raw else unit_vector(vector)))
    )
