"""llama.cpp's `/embedding`: text embeddings in its format and with its kinds of normalization."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.batch import Float32
from octavo.server.errors import refuse
from octavo.server.generation.spec import read_options
from octavo.server.http.json_body import WHOLE, Text
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.protocols.answer_schemas import LLAMA_EMBEDDINGS, whole_answer
from octavo.server.protocols.embedding import EmbeddingJob, Input, embed_inputs, list_of_inputs, vectors_response
from octavo.server.protocols.llama_cpp.errors import LLAMA_CPP
from octavo.server.protocols.protocol_fields import OptionFields
from octavo.server.server_state import state_of

MAX_NORM_ORDER = 64
_LARGEST = 32760  # the largest component with `embd_normalize` 0, for llama.cpp's scaling to 16 bits

router = LLAMA_CPP.router({"prompt": "content"})


class EmbeddingRequest(OptionFields):
    """Texts to embed.

    input: another name of content
    embd_normalize: -1 means no normalization. Otherwise vectors are scaled by their largest component (0), the sum of
    their absolute values (1), or the norm of this order (2, the default, and above).
    """

    model: Text | None = None
    content: Input | None = None
    input: Input | None = None
    embd_normalize: Annotated[int, Field(ge=-1, le=MAX_NORM_ORDER), WHOLE] | None = None


@router.post("/embedding", responses=whole_answer(LLAMA_EMBEDDINGS))
async def create_embedding(request: Request, body: EmbeddingRequest) -> Response:
    """Return the vector of each text, in llama.cpp's format."""
    if (body.content is None) == (body.input is None):
        given = "neither" if body.content is None else "both"
        raise refuse("content", f"or input must be given, not {given}", "missing_required_parameter")
    async with state_of(request).models.use(body.model) as model:
        job = EmbeddingJob(list_of_inputs(body.input if body.content is None else body.content), read_options(body))
        found = await run_unless_gone(request, embed_inputs(request, model, job))
    order = 2 if body.embd_normalize is None else body.embd_normalize

    def write(index: int, vector: Float32) -> dict[str, Any]:
        return {"index": index, "embedding": [list(map(float, normalized(vector, order)))]}

    return await vectors_response(found.vectors, write)


def normalized(vector: Float32, order: int) -> Float32:
    """Return the vector scaled according to `embd_normalize`. A zero vector stays zero."""
    if order < 0:
        return vector
    exact = vector.astype(np.float64)
    largest = float(np.abs(exact).max())
    if order == 0:
        return (exact * (_LARGEST / (largest or 1.0))).astype(np.float32)
    relative = np.abs(exact / (largest or 1.0))  # so that no power overflows
    norm = largest * float((relative**order).sum() ** (1 / order))
    return (exact / (norm or 1.0)).astype(np.float32)
