"""Text Generation Inference's routes, for clients written for it: `/generate`, `/generate_stream`, `/info` and `/`.

Formats and meanings are TGI's: a stop sequence stays in the text, the token that ends the text is reported, and errors
are `{"error", "error_type"}`. The status of an error, however, is the same as on all other routes of this server.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo import __version__
from octavo.sampling_params import MAX_STOP_STRINGS
from octavo.server.errors import refuse
from octavo.server.http.json_body import quote
from octavo.server.protocols.answer_schemas import (
    GENERATED_TEXT,
    INFO,
    streamed_answer,
    whole_answer,
)
from octavo.server.protocols.answering import answer
from octavo.server.protocols.tgi.answer import TgiWriter
from octavo.server.protocols.tgi.errors import TGI
from octavo.server.protocols.tgi.request import FIELD_NAMES, GenerateRequest
from octavo.server.server_state import state_of

router = TGI.router(FIELD_NAMES)


@router.post("/generate", responses=streamed_answer(GENERATED_TEXT))
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continue a text. With `stream`, answer like `/generate_stream`."""
    return await answer(request, _with_adapter(request, body), TgiWriter)


@router.post("/generate_stream", responses=streamed_answer(GENERATED_TEXT))
async def generate_stream(request: Request, body: GenerateRequest) -> Response:
    """Continue a text, with one server-sent event per token."""
    if body.stream is False:
        raise refuse("stream", "is false; /generate gives the whole text at once", "invalid_value")
    return await answer(request, _with_adapter(request, body).model_copy(update={"stream": True}), TgiWriter)


@router.post("/", responses=streamed_answer(GENERATED_TEXT))
async def generate_at_root(request: Request, body: GenerateRequest) -> Response:
    """Continue a text, like `/generate`. Hugging Face's InferenceClient uses this root path."""
    return await answer(request, _with_adapter(request, body), TgiWriter)


def _with_adapter(request: Request, body: GenerateRequest) -> GenerateRequest:
    """Return the body with its adapter as the model. Raises UsageError if there is no such adapter, or if it belongs to
    another model.
    """
    wanted, models = body.wanted.adapter_id, state_of(request).models
    if wanted is None:
        return body
    adapter = models.adapter(wanted)
    if adapter is None:
        known = ", ".join(each.name for each in models.adapters.entries) or "none"
        reason = f"is {quote(wanted)}, but there is no such adapter; available: {known}"
        raise refuse("parameters.adapter_id", reason, "invalid_value")
    if body.model is not None and models.entry(body.model).name != adapter.parent:
        reason = f"is an adapter of {adapter.parent}, not of {quote(body.model)}"
        raise refuse("parameters.adapter_id", reason, "invalid_value")
    adapted: GenerateRequest = body.model_copy(update={"model": wanted})
    return adapted


@router.get("/info", responses=whole_answer(INFO))
async def get_info(request: Request) -> Response:
    """Return the name of the model that serves requests without a model name, and the limits."""
    state = state_of(request)
    async with state.models.use(state.models.default_name) as model:
        info = model.info
        return JSONResponse(
            {
                "model_id": model.name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": info.max_num_seqs + state.config.max_queue,
                "max_best_of": 1,
                "max_stop_sequences": MAX_STOP_STRINGS,
                "max_input_tokens": info.max_prompt_len,
                "max_total_tokens": info.max_model_len,
                "max_client_batch_size": 1,
                "router": "octavo",
                "version": __version__,
                "sha": None,
                "docker_label": None,
            }
        )
