"""The sampling fields of OpenAI's and vLLM's clients, in the requests of chat and text completions.

Every field is honoured or refused. Fields that ask for nothing (`user`, `store: false`) are accepted. Null is absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

from pydantic import ConfigDict, Field, create_model, model_validator

from octavo.errors import UsageError
from octavo.generation_request import RequestOptions
from octavo.sampling_params import (
    MAX_CHOICES,
    MAX_LIST_ITEMS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STRING_CHARS,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
)
from octavo.server.errors import refuse
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import constraint_named, given
from octavo.server.http.json_body import Int, Number, RequestModel, Text

_INT32_MAX = 2**31 - 1
# Sampling fields that beam search honours. The others are refused with it.
_BEAM_FIELDS = frozenset({"n", "max_tokens", "ignore_eos", "skip_special_tokens"})


_LOGIT_BIAS_SCHEMA: dict[str, Any] = {
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_LOGIT_BIAS,
}


def _limits(**limits: Any) -> Any:
    """Limits for the OpenAPI document only. `SamplingParams` checks the values, for all interfaces."""
    return Field(json_schema_extra=limits)


_String: TypeAlias = Annotated[Text, _limits(minLength=1, maxLength=MAX_STRING_CHARS)]
NULL_EXTRAS: dict[str, Any] = {"additionalProperties": {"type": "null"}}


class NullIsAbsent(RequestModel):
    """A request whose unknown fields may be null, because clients send back objects with every field they know."""

    model_config = ConfigDict(json_schema_extra=NULL_EXTRAS)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict) and None in data.values():
            return {name: item for name, item in data.items() if item is not None or name in cls.model_fields}
        return data


class StructuredOutputs(NullIsAbsent):
    """vLLM's `structured_outputs`. Exactly one field must be given."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class AnswerSchema(NullIsAbsent):
    """strict: the schema is enforced in any case."""

    model_config = ConfigDict(json_schema_extra={**NULL_EXTRAS, "required": ["schema"]})

    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[Any, Field(alias="schema", json_schema_extra={"type": "object"})] = None
    strict: bool | None = None


class ResponseFormat(NullIsAbsent):
    """OpenAI's `response_format`. `json_object` may have TGI's `value`, a schema, which Hugging Face's client sends."""

    model_config = ConfigDict(json_schema_extra={**NULL_EXTRAS, "required": ["type"]})

    type: Annotated[Any, Field(json_schema_extra={"enum": ["text", "json_object", "json_schema"]})] = None
    value: Annotated[Any, Field(json_schema_extra={"type": "object"})] = None
    json_schema: AnswerSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.type is None:
            raise refuse("response_format", "lacks its type", "missing_required_parameter")
        members = {"text": (), "json_object": ("value",), "json_schema": ("json_schema",)}
        if not isinstance(self.type, str) or self.type not in members:
            message = f"response_format.type must be text, json_object or json_schema, not {self.type!r:.40}"
            raise UsageError(message, param="response_format", code="unsupported_value")
        for name in ("value", "json_schema"):
            if getattr(self, name) is not None and name not in members[self.type]:
                raise refuse(f"response_format.{name}", f"is not for {self.type}", "unsupported_parameter")
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            reason = "lacks json_schema.schema, the JSON schema of the answer"
            raise refuse("response_format", reason, "missing_required_parameter")
        return self

    def arguments(self) -> dict[str, Any]:
        """Arguments of StructuredOutputsParams; none for plain text."""
        schema = self.value if self.json_schema is None else self.json_schema.schema_
        return {"json": schema} if schema is not None else {"json_object": True} if self.type == "json_object" else {}


class StreamOptions(NullIsAbsent):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def _option_type(kind: type, limits: Mapping[str, Any]) -> Any:
    """The type of an option's field. The limits come before the conversion of numbers, as the document needs them."""
    base, *conversions = get_args({int: Int, float: Number}.get(kind)) or (kind,)
    annotated: Any = Annotated[base, Field(**limits)]
    for conversion in conversions:
        annotated = Annotated[annotated, conversion]
    return annotated | None


_OPTION_TYPES = get_type_hints(RequestOptions)
_OPTIONS: dict[str, Any] = {
    option.name: (_option_type(_OPTION_TYPES[option.name], option.metadata), None) for option in fields(RequestOptions)
}


class OptionFields(create_model("OptionFields", __base__=NullIsAbsent, **_OPTIONS)):  # type: ignore[misc]
    """The fields of `RequestOptions`, for `read_options`."""


class SamplingFields(OptionFields):
    """The fields that chat and text requests share. `SamplingParams` checks the values."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[Int, _limits(minimum=1, maximum=MAX_CHOICES)] | None = None
    temperature: Annotated[Number, _limits(minimum=0, maximum=2)] | None = None
    top_p: Annotated[Number, _limits(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[Int, _limits(minimum=-1)] | None = None
    min_p: Annotated[Number, _limits(minimum=0, maximum=1)] | None = None
    typical_p: Annotated[Number, _limits(exclusiveMinimum=0, maximum=1)] | None = None
    repetition_penalty: Annotated[Number, _limits(exclusiveMinimum=0, maximum=10)] | None = None
    presence_penalty: Annotated[Number, _limits(minimum=-2, maximum=2)] | None = None
    frequency_penalty: Annotated[Number, _limits(minimum=-2, maximum=2)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(json_schema_extra=_LOGIT_BIAS_SCHEMA)] | None = None
    seed: Annotated[Int, _limits(minimum=-(2**63), maximum=2**64 - 1)] | None = None
    stop: _String | Annotated[list[_String], _limits(maxItems=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Annotated[Int, _limits(minimum=0)]], _limits(maxItems=MAX_LIST_ITEMS)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[_String], _limits(maxItems=MAX_LIST_ITEMS)] | None = None
    allowed_token_ids: list[Annotated[Int, _limits(minimum=0)]] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[Int, _limits(minimum=0)] | None = None
    max_tokens: Annotated[Int, _limits(minimum=0)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Annotated[Int, _limits(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[Number, _limits(minimum=-10, maximum=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Text | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None

    truncate_prompt_tokens: Annotated[Int, _limits(minimum=-1)] | None = None
    truncation_side: Literal["left", "middle"] | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None

    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @model_validator(mode="after")
    def _check_values(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "needs stream: true", "invalid_value")
        for name, is_refused in (
            ("store: true", self.store),
            ("spaces_between_special_tokens: false", self.spaces_between_special_tokens is False),
            (
                "stream_options.include_obfuscation: true",
                self.stream_options and self.stream_options.include_obfuscation,
            ),
        ):
            if is_refused:
                raise UsageError(f"{name} is not supported", param=name.partition(":")[0], code="unsupported_value")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of most likely tokens to report with each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def includes_usage(self) -> bool:
        return self._stream_option("include_usage")

    @property
    def has_running_usage(self) -> bool:
        return self._stream_option("continuous_usage_stats")

    def _stream_option(self, name: str) -> bool:
        return bool(getattr(self.stream_options, name, None))

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams | BeamSearchParams:
        """The parameters. max_tokens: as requested, or the default of the route; None: up to the end of the context.

        logprobs: see `num_top_logprobs`.
        Raises UsageError naming the field whose value is wrong.
        """
        if self.use_beam_search:
            return self._beam_search_params(max_tokens)
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                raise UsageError(f"{name} needs use_beam_search: true", param=name, code="invalid_value")
        arguments = given(self, *_PLAIN_FIELDS)
        if self.logit_bias is not None:
            arguments["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, structured_outputs=self.structured_params(), **arguments
        )

    def _beam_search_params(self, max_tokens: int | None) -> BeamSearchParams:
        refused = [name for name in (*_PLAIN_FIELDS, "logit_bias") if name not in _BEAM_FIELDS]
        refused += ["response_format", "structured_outputs", "logprobs", "top_logprobs", *_GUIDED]
        for name in refused:
            value = getattr(self, name, None)
            neutral = (_DEFAULTS.get(name), *_NEUTRAL.get(name, ()))
            given = tuple(value) if isinstance(value, list) else value
            if given is not None and given is not False and given not in neutral:
                message = f"{name} cannot be combined with use_beam_search; leave one of them out"
                raise UsageError(message, param=name, code="unsupported_value")
        width = 1 if self.n is None else self.n
        if not 1 <= width <= MAX_CHOICES:
            code = "integer_below_min_value" if width < 1 else "integer_above_max_value"
            raise UsageError(f"n is {width:.20g}; it must be 1 to {MAX_CHOICES}", param="n", code=code)
        return BeamSearchParams(
            beam_width=width,
            n=width,
            max_tokens=_INT32_MAX if max_tokens is None else max_tokens,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
        )

    def structured_params(self) -> StructuredOutputsParams | None:
        """The constraint on the answer, from any of its fields. Raises UsageError if there are several."""
        constraints = self._constraints()
        if len(constraints) > 1:
            message = f"{' and '.join(constraints)} contradict each other; give one of them"
            raise UsageError(message, param="structured_outputs", code="invalid_value")
        for name, arguments in constraints.items():
            if arguments.get("json") is not None:
                _check_schema(arguments["json"], "structured_outputs.json" if name == "structured_outputs" else name)
            with constraint_named(name):
                return StructuredOutputsParams(**arguments)
        return None

    @property
    def constraint_field(self) -> str:
        """The field that constrains the answer, for errors that the engine finds in it."""
        return next(iter(self._constraints()), "structured_outputs")

    def _constraints(self) -> dict[str, dict[str, Any]]:
        """For each constraint that is given, its field and arguments of StructuredOutputsParams."""
        found: dict[str, dict[str, Any]] = {}
        if self.structured_outputs is not None:
            found["structured_outputs"] = {
                "json": self.structured_outputs.json_,
                **self.structured_outputs.model_dump(exclude={"json_"}, exclude_none=True),
            }
        for field, name in _GUIDED.items():
            if getattr(self, field) is not None:
                found[field] = {name: getattr(self, field)}
        if self.response_format is not None and (arguments := self.response_format.arguments()):
            found["response_format"] = arguments
        return found

    def truncation(self) -> tuple[int | None, Literal["left", "middle"]]:
        """The number of tokens that the prompt may keep, and the side where it is cut."""
        limit = self.truncate_prompt_tokens
        if limit is not None and (limit < -1 or limit == 0):
            reason = f"is {limit}; it must be at least 1, or -1 for as many as fit"
            raise refuse("truncate_prompt_tokens", reason, "integer_below_min_value")
        if self.truncation_side is not None and limit is None:
            raise UsageError("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        return limit, self.truncation_side or "left"


_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_PLAIN_FIELDS = [
    name
    for name in SamplingFields.model_fields
    if name in _DEFAULTS and name not in ("max_tokens", "logit_bias", "structured_outputs")
]
# Values besides the defaults that have no effect without sampling.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"temperature": (0,), "top_k": (-1,), "logit_bias": ({},)}


def _check_schema(schema: object, param: str) -> None:
    """Checks a JSON schema, which may also be text, as with vLLM."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            message = f"{param} is not the text of a JSON schema: {error}"
            raise UsageError(message, param=param, code="invalid_json_schema") from None
    check_schema(schema, param)


def _token_id(key: str) -> int | str:
    """The token id that a JSON key stands for. Other keys are returned unchanged, to be refused.

    Only the plain form of a number is accepted, so that no two keys stand for the same token.
    """
    digits = key.removeprefix("-")
    is_integer = digits.isascii() and digits.isdigit() and len(digits) < 20
    return int(key) if is_integer and str(int(key)) == key else key
