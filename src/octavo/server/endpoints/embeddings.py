"""`/v1/embeddings`: texts as vectors, in OpenAI's shape."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.batch import Float32
from octavo.generation_request import Pooling, PoolingParams, RequestOptions
from octavo.server.errors import refuse
from octavo.server.generation.prompt import prepare_inputs
from octavo.server.generation.running import PROMPTS_AT_ONCE, compute_vectors
from octavo.server.generation.spec import read_options
from octavo.server.http.access_log import record_of
from octavo.server.http.json_body import WHOLE, Int, Text, quote
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.http.route_table import OPENAI
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answer_schemas import EMBEDDINGS, whole_answer
from octavo.server.protocols.answering import name_ignored, tenant_of
from octavo.server.protocols.ignored_fields import VECTORS, with_ignored
from octavo.server.protocols.protocol_errors import protocol_route
from octavo.server.protocols.protocol_fields import OptionFields, kind_of_inputs
from octavo.server.server_state import state_of

MAX_INPUTS = 2048

FIELD_NAMES = {"prompt": "input"}
router = APIRouter(route_class=protocol_route(OPENAI, FIELD_NAMES), tags=["openai"])


_MANY = Field(min_length=1, max_length=MAX_INPUTS)
Input: TypeAlias = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Tag("texts"), _MANY]
    | Annotated[list[Int], Tag("tokens")]
    | Annotated[list[list[Int]], Tag("token lists"), _MANY],
    Discriminator(kind_of_inputs),
]


class EmbeddingsRequest(with_ignored(OptionFields, VECTORS)):  # type: ignore[misc]
    """pooling: the pooling of the last hidden states, an addition to OpenAI's fields; None: as the
    checkpoint says, else mean. dimensions: only the model's own number."""

    model: Text | None = None
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = None
    user: Text | None = None


@router.post("/embeddings", include_in_schema=False)
@router.post("/v1/embeddings", responses=whole_answer(EMBEDDINGS))
async def create_embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """One vector of length 1 for each input, in their order."""
    async with state_of(request).models.use(body.model) as model:
        return await run_unless_gone(request, _embed(request, body, model))


async def _embed(request: Request, body: EmbeddingsRequest, model: ServedModel) -> Response:
    check_dimensions(body.dimensions, model)
    if body.truncate_prompt_tokens == 0:
        reason = "is 0; it must be at least 1, or -1 for as many as fit"
        raise refuse("truncate_prompt_tokens", reason, "integer_below_min_value")
    inputs = list_of_inputs(body.input)
    job = EmbeddingJob(inputs, read_options(body), body.pooling, body.truncate_prompt_tokens)
    vectors = await embed_inputs(request, model, job)
    data = [
        {"object": "embedding", "index": i, "embedding": _encode(vector, body.encoding_format)}
        for i, vector in enumerate(vectors.vectors)
    ]
    usage = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
    if body.truncate_prompt_tokens is not None:
        usage["truncated_tokens"] = vectors.num_truncated_tokens
    content = {"object": "list", "data": data, "model": model.name, "usage": usage}
    return name_ignored(body.find_ignored(), record_of(request), JSONResponse(content))


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """Texts to embed. truncate_to, side: see `Common.truncate_prompt_tokens`."""

    inputs: Sequence[str | Sequence[int]]
    options: RequestOptions
    pooling: Pooling | None = None  # as the checkpoint says
    truncate_to: int | None = None
    side: Literal["left", "right"] = "left"


@dataclass(frozen=True, slots=True)
class Embedded:
    """vectors: [hidden_size] for each input, not normalised."""

    vectors: list[Float32]
    num_tokens: int
    num_truncated_tokens: int


async def embed_inputs(request: Request, model: ServedModel, job: EmbeddingJob) -> Embedded:
    """The vectors of all inputs; errors about one of them name `prompt`."""
    record = record_of(request)
    record.model = model.name
    ticket = state_of(request).admission.admit(
        model,
        record.request_id,
        num_sequences=min(len(job.inputs), PROMPTS_AT_ONCE),
        tenant=tenant_of(request),
    )
    try:
        prepare = partial(prepare_inputs, model, job.inputs, job.truncate_to, job.side)
        prompts, num_truncated = await ticket.wait(prepare)
        record.num_prompt_tokens = sum(map(len, prompts))
        ticket.add_prompt_tokens(record.num_prompt_tokens)
        params = PoolingParams(pooling=job.pooling)
        vectors = await compute_vectors(ticket, model, [(prompt, params) for prompt in prompts], job.options)
    finally:
        ticket.release()
    return Embedded(vectors, record.num_prompt_tokens, num_truncated)


def list_of_inputs(given: Any) -> Sequence[str | Sequence[int]]:
    """All inputs of an `Input`, of which one alone may be a text or a list of ids."""
    return [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given


def check_dimensions(wanted: int | None, model: ServedModel) -> None:
    """Raises UsageError for another number of dimensions than the model's own."""
    width = model.info.hidden_size
    if wanted not in (None, width):
        reason = f"is {quote(wanted)}, but this model's embeddings have {width}; leave it out"
        raise refuse("dimensions", reason, "unsupported_parameter")


def unit_vector(vector: Float32) -> Float32:
    """The vector scaled to length 1; a zero vector stays zero."""
    return (vector / (float(np.linalg.norm(vector)) or 1.0)).astype(np.float32)


def _encode(vector: Float32, encoding: str | None) -> list[float] | str:
    """The unit vector. base64: of the float32s, little endian."""
    unit = unit_vector(vector)
    return base64.b64encode(unit.astype("<f4").tobytes()).decode() if encoding == "base64" else list(map(float, unit))
