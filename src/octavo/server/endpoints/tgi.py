"""Text Generation Inference's routes, for clients written for it: `/generate`, `/generate_stream`, `/info` and `/`.

Shapes and meanings are TGI's: a stop sequence stays in the text, the token that ends the text is reported, and errors
are `{"error", "error_type"}`. Their status is the one that all routes of this server use.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo import __version__
from octavo.sampling_params import MAX_STOP_STRINGS, SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.run import start_text
from octavo.server.generation.spec import Generation, TextSpec, read_options
from octavo.server.http.json_body import Int, Number, RequestModel, Text, quote
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answer_schemas import GENERATED_TEXT, INFO, streamed_answer, whole_answer
from octavo.server.protocols.answering import AnswerWriter, answer, tenant_of
from octavo.server.protocols.protocol_errors import TGI, TGI_SCHEMA, describe_errors, protocol_route, request_id_of
from octavo.server.protocols.sampling_fields import OptionFields
from octavo.server.protocols.tgi_answer import TgiOptions, TgiWriter
from octavo.server.state import state_of

DEFAULT_MAX_NEW_TOKENS = 100

_SAMPLING = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "seed", "stop")
_FIELD_NAMES = {
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "truncate_prompt_tokens": "parameters.truncate",
    "structured_outputs": "parameters.grammar",
    "logprobs": "parameters.top_n_tokens",
    **{name: f"parameters.{name}" for name in _SAMPLING},
}

router = APIRouter(
    route_class=protocol_route(TGI, _FIELD_NAMES),
    tags=["text generation inference"],
    responses=describe_errors(TGI_SCHEMA),
)


class Grammar(RequestModel):
    """What the text must look like. value: a JSON schema; for json_schema `{"schema": ...}`; for regex its text."""

    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | Text


class Parameters(RequestModel):
    """How to generate. Without do_sample and without any value that shapes a distribution it is greedy."""

    max_new_tokens: Int | None = None
    temperature: Number | None = None
    top_k: Int | None = None
    top_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    frequency_penalty: Number | None = None
    do_sample: bool | None = None
    seed: Int | None = None
    stop: list[Text] | None = None
    truncate: Int | None = Field(default=None, ge=1)
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: Int | None = Field(default=None, ge=0, le=20)
    grammar: Grammar | None = None
    best_of: Int | None = None
    watermark: bool | None = None
    adapter_id: Text | None = None


class GenerateRequest(OptionFields):
    """stream: for `/` and `/generate`. model: an addition to TGI, for servers of several models."""

    inputs: Text
    parameters: Parameters | None = None
    stream: bool | None = None
    model: Text | None = None


@router.post("/generate", responses=streamed_answer(GENERATED_TEXT))
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continues a text; with `stream` as `/generate_stream` does."""
    return await _generate(request, body, stream=bool(body.stream))


@router.post("/generate_stream", responses=streamed_answer(GENERATED_TEXT))
async def generate_stream(request: Request, body: GenerateRequest) -> Response:
    """Continues a text; one server-sent event a token."""
    if body.stream is False:
        raise refuse("stream", "is false; /generate gives the whole text at once", "invalid_value")
    return await _generate(request, body, stream=True)


@router.post("/", responses=streamed_answer(GENERATED_TEXT))
async def generate_at_root(request: Request, body: GenerateRequest) -> Response:
    """As `/generate`, at the address itself, which is where Hugging Face's InferenceClient asks."""
    return await _generate(request, body, stream=bool(body.stream))


@router.get("/info", responses=whole_answer(INFO))
async def get_info(request: Request) -> Response:
    """The model that requests without a name get, and the limits."""
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
                "max_input_tokens": info.max_model_len - 1,
                "max_total_tokens": info.max_model_len,
                "max_client_batch_size": 1,
                "router": "octavo",
                "version": __version__,
                "sha": None,
                "docker_label": None,
            }
        )


async def _generate(request: Request, body: GenerateRequest, *, stream: bool) -> Response:
    parameters = body.parameters or Parameters()
    _refuse_unsupported(parameters, stream)
    seed = parameters.seed
    if seed is None and _samples(parameters):
        seed = secrets.randbits(63)  # it is reported, so that the answer can be had again
    params = _sampling_params(parameters, seed, stream)
    spec = TextSpec(
        prompts=[body.inputs],
        params=params,
        tenant=tenant_of(request),
        options=read_options(body),
        truncate_prompt_tokens=parameters.truncate,
        max_tokens_may_shrink=parameters.max_new_tokens is None,
    )

    async def start(model: ServedModel) -> tuple[Generation, AnswerWriter]:
        generation = await start_text(state_of(request), model, spec, request_id_of(request))
        writer = TgiWriter(model, generation, params, _options(body.inputs, parameters, seed))
        return generation, writer

    return await answer(request, body.model, start, stream=stream)


def _options(prompt: str, parameters: Parameters, seed: int | None) -> TgiOptions:
    return TgiOptions(
        seed=seed,
        shown_prompt=prompt if parameters.return_full_text else "",
        num_top_tokens=parameters.top_n_tokens or 0,
        has_details=bool(parameters.details or parameters.decoder_input_details),
        reports_truncation=parameters.truncate is not None,
    )


def _refuse_unsupported(parameters: Parameters, stream: bool) -> None:
    if parameters.best_of not in (None, 1):
        raise refuse(
            "parameters.best_of", f"is {quote(parameters.best_of)}; one sequence is generated, so leave it out"
        )
    if parameters.watermark:
        raise refuse("parameters.watermark", "is not supported; leave it out")
    if parameters.adapter_id is not None:
        raise refuse("parameters.adapter_id", "names an adapter, and this server has none; leave it out")
    if parameters.decoder_input_details and stream:
        raise refuse("parameters.decoder_input_details", "needs an answer that is not streamed")
    if parameters.top_n_tokens and not (stream or parameters.details or parameters.decoder_input_details):
        raise refuse("parameters.top_n_tokens", "needs details: true, or a stream", "invalid_value")
    if parameters.temperature == 0:
        raise refuse(
            "parameters.temperature",
            "must be above 0; leave it and do_sample out for the most likely token",
            "decimal_below_min_value",
        )
    if parameters.top_k is not None and parameters.top_k < 1:
        raise refuse("parameters.top_k", "must be at least 1; leave it out for all tokens", "integer_below_min_value")


def _samples(parameters: Parameters) -> bool:
    shaped = parameters.temperature not in (None, 1.0) or parameters.top_k is not None
    cut = parameters.top_p not in (None, 1.0) or parameters.typical_p not in (None, 1.0)
    return bool(parameters.do_sample) or shaped or cut


def _sampling_params(parameters: Parameters, seed: int | None, stream: bool) -> SamplingParams:
    given: dict[str, Any] = {
        name: value
        for name in ("top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "stop")
        if (value := getattr(parameters, name)) is not None
    }
    temperature = 1.0 if parameters.temperature is None else parameters.temperature
    wants_tokens = stream or parameters.details or parameters.decoder_input_details
    return SamplingParams(
        **given,
        temperature=temperature if _samples(parameters) else 0.0,
        seed=seed,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if parameters.max_new_tokens is None else parameters.max_new_tokens,
        include_stop_str_in_output=True,
        logprobs=(parameters.top_n_tokens or 0) if wants_tokens else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        structured_outputs=None if parameters.grammar is None else _structured(parameters.grammar),
    )


def _structured(grammar: Grammar) -> StructuredOutputsParams:
    param = "parameters.grammar.value"
    if grammar.type == "regex":
        if not isinstance(grammar.value, str):
            raise refuse(param, "must be a regular expression in a string", "invalid_type")
        return StructuredOutputsParams(regex=grammar.value)
    schema: Any = grammar.value
    if grammar.type == "json_schema":
        if not isinstance(schema, dict) or "schema" not in schema:
            raise refuse(param, 'must be an object with the schema as "schema"', "missing_required_parameter")
        schema = schema["schema"]
    if not isinstance(schema, str):
        check_schema(schema, param)
    return StructuredOutputsParams(json=schema)
