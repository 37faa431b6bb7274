"""The body of Text Generation Inference's routes, and the request that it makes of a model."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from pydantic import Field

from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import TextSpec, given, read_options
from octavo.server.http.json_body import Int, Number, RequestModel, Text, quote
from octavo.server.protocols.sampling_fields import OptionFields

DEFAULT_MAX_NEW_TOKENS = 100

_SAMPLING = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "seed", "stop")
FIELD_NAMES = {
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "truncate_prompt_tokens": "parameters.truncate",
    "structured_outputs": "parameters.grammar",
    "logprobs": "parameters.top_n_tokens",
    **{name: f"parameters.{name}" for name in _SAMPLING},
}


class Grammar(RequestModel):
    """The form of the text. value: a JSON schema; for json_schema `{"schema": ...}`; for regex its text."""

    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | Text


class Parameters(RequestModel):
    """Generation is greedy without do_sample and without any value that shapes the distribution."""

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

    @property
    def has_details(self) -> bool:
        return bool(self.details or self.decoder_input_details)

    @property
    def samples(self) -> bool:
        shapes = (self.temperature not in (None, 1.0), self.top_p not in (None, 1.0), self.typical_p not in (None, 1.0))
        return bool(self.do_sample) or self.top_k is not None or any(shapes)


class GenerateRequest(OptionFields):
    """stream: for `/` and `/generate`. model: an addition to TGI, for servers with several models."""

    inputs: Text
    parameters: Parameters | None = None
    stream: bool | None = None
    model: Text | None = None

    @property
    def wanted(self) -> Parameters:
        return self.parameters or Parameters()


def to_text_spec(body: GenerateRequest, tenant: str) -> TextSpec:
    """The request to a model. Raises UsageError for what cannot be honoured."""
    parameters = body.wanted
    _refuse_unsupported(parameters, bool(body.stream))
    return TextSpec(
        prompts=[body.inputs],
        params=_sampling_params(parameters, bool(body.stream)),
        options=read_options(body),
        tenant=tenant,
        truncate_prompt_tokens=parameters.truncate,
        max_tokens_may_shrink=parameters.max_new_tokens is None,
    )


def _refuse_unsupported(wanted: Parameters, stream: bool) -> None:
    other, low = "unsupported_value", "integer_below_min_value"
    lonely_tokens = wanted.top_n_tokens and not (stream or wanted.has_details)
    greedy = "must be above 0; leave it and do_sample out for the most likely token"
    for name, is_wrong, code, reason in (
        ("best_of", wanted.best_of not in (None, 1), other, f"is {quote(wanted.best_of)}; it can only be 1"),
        ("watermark", wanted.watermark, other, "is not supported; leave it out"),
        (
            "adapter_id",
            wanted.adapter_id is not None,
            other,
            "names an adapter, and this server has none; leave it out",
        ),
        ("decoder_input_details", wanted.decoder_input_details and stream, other, "needs stream: false"),
        ("top_n_tokens", lonely_tokens, "invalid_value", "needs details: true, or a stream"),
        ("temperature", wanted.temperature == 0, "decimal_below_min_value", greedy),
        (
            "top_k",
            wanted.top_k is not None and wanted.top_k < 1,
            low,
            "must be at least 1; leave it out for all tokens",
        ),
    ):
        if is_wrong:
            raise refuse(f"parameters.{name}", reason, code)


def _sampling_params(parameters: Parameters, stream: bool) -> SamplingParams:
    seed = parameters.seed
    if seed is None and parameters.samples:
        seed = secrets.randbits(63)  # it is reported, so that the answer can be reproduced
    return SamplingParams(
        **given(parameters, "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "stop"),
        temperature=(1.0 if parameters.temperature is None else parameters.temperature) if parameters.samples else 0.0,
        seed=seed,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if parameters.max_new_tokens is None else parameters.max_new_tokens,
        include_stop_str_in_output=True,
        logprobs=(parameters.top_n_tokens or 0) if stream or parameters.has_details else None,
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
