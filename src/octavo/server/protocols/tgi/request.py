"""The bodies of Text Generation Inference's routes, and their conversion to model-independent requests."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import TextSpec, given, read_options
from octavo.server.http.json_body import WHOLE, Int, RequestModel, Text, quote
from octavo.server.protocols.ignored_fields import TGI as TGI_FIELDS
from octavo.server.protocols.ignored_fields import with_ignored
from octavo.server.protocols.protocol_fields import AnsweredFields, NumLogprobs, with_parameters

DEFAULT_MAX_NEW_TOKENS = 100

_NUMBERS = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "seed")
FIELD_NAMES = {
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "truncate_prompt_tokens": "parameters.truncate",
    "structured_outputs": "parameters.grammar",
    "logprobs": "parameters.top_n_tokens",
    **{name: f"parameters.{name}" for name in (*_NUMBERS, "stop")},
}


class Grammar(RequestModel):
    """The required form of the text.

    value: a JSON schema for `json`, an object `{"schema": ...}` for `json_schema`, or the expression for `regex`
    """

    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | Text


class Parameters(with_parameters(RequestModel, *_NUMBERS)):  # type: ignore[misc]
    """Generation parameters. Generation is greedy unless do_sample or a value that shapes the distribution is set."""

    max_new_tokens: Int | None = None
    do_sample: bool | None = None
    stop: list[Text] | None = None
    truncate: Annotated[int, Field(ge=1), WHOLE] | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: NumLogprobs | None = None
    grammar: Grammar | None = None
    best_of: Int | None = None
    watermark: bool | None = None
    adapter_id: Text | None = None

    @property
    def has_details(self) -> bool:
        return bool(self.details or self.decoder_input_details)

    @property
    def samples(self) -> bool:
        shapes = {self.temperature, self.top_p, self.typical_p} - {None, 1.0}
        return bool(self.do_sample or self.top_k is not None or shapes)


class GenerateRequest(with_ignored(AnsweredFields, TGI_FIELDS)):  # type: ignore[misc]
    """A text to continue.

    stream: applies to `/` and `/generate`
    model: an addition to TGI, for servers with several models
    """

    inputs: Text
    parameters: Parameters | None = None

    @property
    def wanted(self) -> Parameters:
        return self.parameters or Parameters()

    def to_spec(self, tenant: str) -> TextSpec:
        parameters = self.wanted
        named = given(parameters, *_NUMBERS) if parameters.samples else SamplingParams.__dataclass_fields__
        _refuse_unsupported(parameters, bool(self.stream))
        return TextSpec(
            prompts=[self.inputs],
            params=_sampling_params(parameters, bool(self.stream)),
            given=frozenset(named),
            options=read_options(self),
            tenant=tenant,
            truncate_prompt_tokens=parameters.truncate,
        )


def _refuse_unsupported(wanted: Parameters, stream: bool) -> None:
    lonely_tokens = wanted.top_n_tokens and not (stream or wanted.has_details)
    has_low_top_k = wanted.top_k is not None and wanted.top_k < 1
    greedy = "must be above 0; leave it and do_sample out for the most likely token"
    only_one = f"is {quote(wanted.best_of)}; it can only be 1"
    for name, is_wrong, reason, code in (
        ("best_of", wanted.best_of not in (None, 1), only_one, "unsupported_value"),
        ("watermark", wanted.watermark, "is not supported; leave it out", "unsupported_value"),
        ("decoder_input_details", wanted.decoder_input_details and stream, "needs stream: false", "unsupported_value"),
        ("top_n_tokens", lonely_tokens, "needs details: true, or a stream", "invalid_value"),
        ("temperature", wanted.temperature == 0, greedy, "decimal_below_min_value"),
        ("top_k", has_low_top_k, "must be at least 1; leave it out for all tokens", "integer_below_min_value"),
    ):
        if is_wrong:
            raise refuse(f"parameters.{name}", reason, code)


def _sampling_params(wanted: Parameters, stream: bool) -> SamplingParams:
    arguments = given(wanted, *_NUMBERS, "stop")
    if not wanted.samples:
        arguments["temperature"] = 0.0
    elif wanted.seed is None:
        arguments["seed"] = secrets.randbits(63)  # reported, so that the answer can be reproduced
    return SamplingParams(
        **arguments,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if wanted.max_new_tokens is None else wanted.max_new_tokens,
        include_stop_str_in_output=True,
        logprobs=(wanted.top_n_tokens or 0) if stream or wanted.has_details else None,
        prompt_logprobs=0 if wanted.decoder_input_details else None,
        structured_outputs=None if wanted.grammar is None else _structured(wanted.grammar),
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
