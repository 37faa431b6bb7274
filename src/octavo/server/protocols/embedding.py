"""Text embedding: the inputs of a request and their conversion to vectors, shared by all protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from anyio.to_thread import run_sync
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.batch import Float32
from octavo.errors import UsageError
from octavo.generation_request import Pooling, PoolingParams, RequestOptions
from octavo.server.errors import refuse
from octavo.server.generation.prompt import prepare_conversation, prepare_inputs
from octavo.server.generation.running import PROMPTS_AT_ONCE, compute_vectors
from octavo.server.generation.spec import ChatSpec
from octavo.server.http.access_log import record_of
from octavo.server.http.json_body import WHOLE_NUMBERS, Int, Text, quote
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import tenant_of, with_batch_priority
from octavo.server.protocols.protocol_fields import kind_of_inputs
from octavo.server.server_state import state_of

MAX_INPUTS = 2048

_encoder = msgspec.json.Encoder()
_VECTORS_AT_ONCE = 64
_MOST_INLINE = 1 << 15  # values whose JSON takes less time than switching to a thread
_MOST_VALUES = 1 << 24  # in the vectors of all tokens of a request
_MANY = Field(min_length=1, max_length=MAX_INPUTS)
_Piece: TypeAlias = Int | Text


def _kind(value: Any) -> str:
    """Return the kind of one or more inputs. A list that mixes ids and texts is one input; a list that contains a list
    is several inputs.
    """
    if not isinstance(value, list) or not value:
        return kind_of_inputs(value)
    if any(isinstance(item, list) for item in value):
        return "inputs"
    has_ids, has_texts = (any(isinstance(item, kind) for item in value) for kind in ((int, float), str))
    return "pieces" if has_ids and has_texts else kind_of_inputs(value)


# Lists of only texts or only ids have separate types, so that thousands of items need not each be matched to a union.
Input: TypeAlias = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Tag("texts"), _MANY]
    | Annotated[list[int], WHOLE_NUMBERS, Tag("tokens")]
    | Annotated[list[_Piece], Tag("pieces")]
    | Annotated[list[Text | list[_Piece]], Tag("inputs"), _MANY],
    Discriminator(_kind),
]


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """Texts to embed.

    truncate_to, side: see `Common.truncate_prompt_tokens`
    chat: a conversation to embed instead of texts
    of_tokens: return the vectors of all tokens of an input, one after another
    """

    inputs: Sequence[str | Sequence[int | str]]
    options: RequestOptions
    pooling: Pooling | None = None  # None for the checkpoint's own
    truncate_to: int | None = None
    side: Literal["left", "right"] = "left"
    chat: ChatSpec | None = None
    of_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Embedded:
    """The result of an embedding job.

    vectors: [hidden_size] for each input, not normalised
    """

    vectors: list[Float32]
    num_tokens: int
    num_truncated_tokens: int
    num_image_tokens: int = 0


async def embed_inputs(request: Request, model: ServedModel, job: EmbeddingJob) -> Embedded:
    """Return the vectors of all inputs. In errors about an input, `param` is `prompt`."""
    record = record_of(request)
    record.model = model.name
    ticket = state_of(request).admission.admit(
        model,
        record.request_id,
        num_sequences=min(len(job.inputs), PROMPTS_AT_ONCE) or 1,
        tenant=tenant_of(request),
        is_batch=record.batch_priority is not None,
    )
    options = with_batch_priority(job.options, record)
    try:
        prepare = partial(prepare_inputs, model, job.inputs, job.truncate_to, job.side)
        if job.chat is not None:
            prepare = partial(prepare_conversation, model, job.chat)
        prompts, num_truncated = await ticket.wait(prepare)
        record.num_prompt_tokens = sum(map(len, prompts))
        if job.of_tokens:
            _check_size(record.num_prompt_tokens, model.info.hidden_size)
        ticket.add_prompt_tokens(record.num_prompt_tokens)
        params = PoolingParams(pooling=job.pooling, task="token_embed" if job.of_tokens else "embed")
        vectors = await compute_vectors(ticket, model, [(prompt, params) for prompt in prompts], options)
    finally:
        ticket.release()
    num_image_tokens = sum(span.length for prompt in prompts for span in prompt.spans)
    return Embedded(vectors, record.num_prompt_tokens, num_truncated, num_image_tokens)


def list_of_inputs(given: Any) -> Sequence[str | Sequence[int | str]]:
    """Return all inputs in an `Input`. A single input may be a text, or a list of ids that may contain texts."""
    is_one = isinstance(given, str) or not given or any(isinstance(item, int) for item in given)
    return [given] if is_one else given


async def vectors_response(
    vectors: Sequence[Float32],
    write: Callable[[int, Float32], Any],
    head: Mapping[str, Any] | None = None,
    key: str = "",
) -> Response:
    """Respond with a list that contains the result of `write` for each vector and its number. If `head` is given,
    respond with this object and add the list to it as `key`.

    The list is written on a thread, some vectors at a time, because it takes a second and tens of megabytes for
    thousands of vectors.
    """
    start, end = (b"[", b"]") if head is None else (b'{"%b":[' % key.encode(), b"]," + _encoder.encode(head)[1:])

    def encode(first: int) -> bytes:
        some = enumerate(vectors[first : first + _VECTORS_AT_ONCE], first)
        return (b"," if first else b"") + b",".join(_encoder.encode(write(i, vector)) for i, vector in some)

    async def pieces() -> AsyncIterator[bytes]:
        yield start
        for first in range(0, len(vectors), _VECTORS_AT_ONCE):
            yield await run_sync(encode, first)
        yield end

    if len(vectors) > _VECTORS_AT_ONCE:
        return StreamingResponse(pieces(), media_type="application/json")
    is_short = len(vectors) == 1 and vectors[0].size <= _MOST_INLINE
    listed = encode(0) if is_short else await run_sync(encode, 0)
    return Response(start + listed + end, media_type="application/json")


def _check_size(num_tokens: int, width: int) -> None:
    """Raise UsageError if the vectors of `num_tokens` tokens are too large for one answer."""
    if num_tokens * width > _MOST_VALUES:
        message = (
            f"the input has {num_tokens} tokens, each with a vector of {width} values, but one answer has at most "
            f"{_MOST_VALUES // width} such vectors: send fewer or shorter texts"
        )
        raise UsageError(message, param="prompt", code="invalid_value")


def check_dimensions(wanted: int | None, model: ServedModel) -> None:
    """Raise UsageError if the number of dimensions differs from the model's own."""
    width = model.info.hidden_size
    if wanted not in (None, width):
        reason = f"is {quote(wanted)}, but this model's embeddings have {width} dimensions; leave it out"
        raise refuse("dimensions", reason, "unsupported_parameter")


def unit_vector(vector: Float32) -> Float32:
    """Return the vector scaled to length 1. A zero vector stays zero."""
    return (vector / (float(np.linalg.norm(vector)) or 1.0)).astype(np.float32)
