"""`/v1/embeddings`: embeddings of texts in OpenAI's format, and of conversations with images in vLLM's format.

vLLM's `/pooling` returns the vectors of all tokens of texts, for late interaction.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.batch import Float32
from octavo.sampling_params import SamplingParams
from octavo.server.errors import refuse
from octavo.server.generation.spec import ChatSpec, read_options
from octavo.server.http.access_log import record_of
from octavo.server.http.json_body import WHOLE, Int, Text
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answer_schemas import EMBEDDINGS, POOLING, whole_answer
from octavo.server.protocols.answering import name_ignored
from octavo.server.protocols.embedding import (
    EmbeddingJob,
    Input,
    check_dimensions,
    embed_inputs,
    list_of_inputs,
    unit_vector,
    vectors_response,
)
from octavo.server.protocols.ignored_fields import VECTORS, with_ignored
from octavo.server.protocols.openai.chat_request import MAX_MESSAGES, Message, TemplateFields, chat_messages
from octavo.server.protocols.openai.errors import OPENAI
from octavo.server.protocols.protocol_fields import OptionFields
from octavo.server.server_state import state_of

FIELD_NAMES = {"prompt": "input"}
IMAGE_PATHS = ("/v1/embeddings", "/embeddings")
router = OPENAI.router(FIELD_NAMES)


class EmbeddingsRequest(with_ignored(OptionFields, VECTORS), TemplateFields):  # type: ignore[misc]
    """Texts or a conversation to embed.

    messages: a conversation as the only input
    pooling: pooling of the last hidden states, an addition to OpenAI's fields. By default it is read from the
    checkpoint, or is mean if the checkpoint does not name one.
    dimensions: only the model's own number is accepted
    """

    model: Text | None = None
    input: Input | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = None
    user: Text | None = None


class PoolingRequest(OptionFields):
    """Texts to convert to vectors.

    task: token_embed for a vector of each token, embed for a vector of the text, or None for the model's own task
    """

    model: Text | None = None
    input: Input
    task: Literal["token_embed", "embed"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = None
    user: Text | None = None


@router.post("/embeddings", include_in_schema=False)
@router.post("/v1/embeddings", responses=whole_answer(EMBEDDINGS))
async def create_embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Return one vector of length 1 for each input, in order."""
    async with state_of(request).models.use(body.model) as model:
        return await run_unless_gone(request, _embed(request, body, model))


@router.post("/pooling", responses=whole_answer(POOLING))
async def create_pooling(request: Request, body: PoolingRequest) -> Response:
    """Return the vectors of each input's tokens, or one vector of each input, depending on the model."""
    async with state_of(request).models.use(body.model) as model:
        return await run_unless_gone(request, _pool(request, body, model))


async def _pool(request: Request, body: PoolingRequest, model: ServedModel) -> Response:
    _check_room(body.truncate_prompt_tokens)
    of_tokens = body.task == "token_embed" or (body.task is None and model.info.texts.pooling == "all")
    job = EmbeddingJob(list_of_inputs(body.input), read_options(body), None, body.truncate_prompt_tokens)
    found = await embed_inputs(request, model, replace(job, of_tokens=of_tokens))

    def write(index: int, vector: Float32) -> dict[str, Any]:
        rows = vector.reshape(-1, model.info.hidden_size) if of_tokens else vector
        return {"object": "pooling", "index": index, "data": rows.tolist()}

    usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
    return await vectors_response(found.vectors, write, {"object": "list", "model": model.name, "usage": usage}, "data")


async def _embed(request: Request, body: EmbeddingsRequest, model: ServedModel) -> Response:
    check_dimensions(body.dimensions, model)
    _check_room(body.truncate_prompt_tokens)
    vectors = await embed_inputs(request, model, _job(body))

    def write(index: int, vector: Float32) -> dict[str, Any]:
        return {"object": "embedding", "index": index, "embedding": _encode(vector, body.encoding_format)}

    usage: dict[str, Any] = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
    if vectors.num_image_tokens:
        usage["prompt_tokens_details"] = {"image_tokens": vectors.num_image_tokens}
    if body.truncate_prompt_tokens is not None:
        usage["truncated_tokens"] = vectors.num_truncated_tokens
    head = {"object": "list", "model": model.name, "usage": usage}
    response = await vectors_response(vectors.vectors, write, head, "data")
    return name_ignored(body.find_ignored(), record_of(request), response)


def _check_room(room: int | None) -> None:
    """Raise UsageError if inputs are to be cut to 0 tokens."""
    if room == 0:
        reason = "is 0; it must be at least 1, or -1 for as many as fit"
        raise refuse("truncate_prompt_tokens", reason, "integer_below_min_value")


def _job(body: EmbeddingsRequest) -> EmbeddingJob:
    """Return the embedding job. Raises UsageError unless exactly one of `input` and `messages` is given."""
    options, room = read_options(body), body.truncate_prompt_tokens
    if body.messages is None:
        if stray := next((name for name in TemplateFields.model_fields if getattr(body, name) is not None), None):
            raise refuse(stray, "needs messages, because only they use the chat template", "invalid_value")
        if body.input is None:
            raise refuse("input", "is required, or messages with one conversation", "missing_required_parameter")
        return EmbeddingJob(list_of_inputs(body.input), options, body.pooling, room)
    if body.input is not None:
        raise refuse("messages", "cannot be combined with input; send one of them", "invalid_value")
    chat = ChatSpec(
        params=SamplingParams(max_tokens=1),  # it generates nothing, and needs no room for it
        truncate_prompt_tokens=room,
        messages=chat_messages(body.messages),
        tool_choice="none",
        template_arguments={"add_generation_prompt": False, **body.template_arguments(body.messages)},
    )
    return EmbeddingJob((), options, body.pooling, chat=chat)


def _encode(vector: Float32, encoding: str | None) -> list[float] | str:
    """Return the unit vector as numbers, or as the base64 of little-endian float32s."""
    unit = unit_vector(vector)
    return base64.b64encode(unit.astype("<f4").tobytes()).decode() if encoding == "base64" else list(map(float, unit))
