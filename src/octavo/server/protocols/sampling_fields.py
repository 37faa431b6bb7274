"""The sampling fields that OpenAI's and vLLM's clients use in requests for chat and text completions.

Every field is honoured or refused. Fields that ask for nothing (`user`, `store: false`) are accepted. Null means
absent.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from octavo.engine.texts.gbnf import GbnfError, is_gbnf, parse_gbnf
from octavo.errors import UsageError
from octavo.sampling_params import MAX_LOGIT_BIAS, BeamSearchParams, SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import constraint_named, given
from octavo.server.http.json_body import Int, Number, Text
from octavo.server.protocols.cache_breakpoints import PromptCacheOptions
from octavo.server.protocols.llama_sampling import LlamaDrafts, OtherSamplers
from octavo.server.protocols.protocol import rename_fields
from octavo.server.protocols.protocol_fields import NULL_EXTRAS, AnsweredFields, NullIsAbsent, with_parameters

_BEAM_FIELDS = ("length_penalty", "early_stopping")
# Parameters that requests have in another form, or not at all. All other parameters are fields of requests.
_NO_FIELDS = ("logit_bias", "logprobs", "structured_outputs", "detokenize", "output_kind", "processed_logprobs")
_PARAMETERS = tuple(item.name for item in fields(SamplingParams) if item.name not in _NO_FIELDS)
# Parameters that beam search honours. It refuses all others, unless they have no effect without sampling.
_BEAM_PARAMS = frozenset({"n", "max_tokens", "ignore_eos", "skip_special_tokens"})
_NEUTRAL: dict[str, object] = {"temperature": 0, "top_k": -1, "logit_bias": {}}
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_GUIDED |= {"json_schema": "json", "grammar": "grammar"}  # llama.cpp's
# Other products' names for parameters.
_ALIASES = {"max_completion_tokens": "max_tokens", "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# The plain form of an integer, so that no two keys of an object mean the same token.
_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")
_BIAS: dict[str, Any] = {
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_LOGIT_BIAS,
}


class StructuredOutputs(NullIsAbsent):
    """vLLM's `structured_outputs`. Exactly one field must be given."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class AnswerSchema(NullIsAbsent):
    """A JSON schema for the answer.

    strict: has no effect, because the schema is always enforced
    """

    model_config = ConfigDict(json_schema_extra={**NULL_EXTRAS, "required": ["schema"]})

    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[Any, Field(alias="schema", json_schema_extra={"type": "object"})] = None
    strict: bool | None = None


class ResponseFormat(NullIsAbsent):
    """OpenAI's `response_format`.

    value: the schema in TGI's form, for the type `json_object`
    schema: the schema in llama.cpp's form, for both types of JSON
    """

    model_config = ConfigDict(json_schema_extra={**NULL_EXTRAS, "required": ["type"]})

    type: Annotated[Any, Field(json_schema_extra={"enum": ["text", "json_object", "json_schema"]})] = None
    value: Annotated[Any, Field(json_schema_extra={"type": "object"})] = None
    schema_: Annotated[Any, Field(alias="schema", json_schema_extra={"type": "object"})] = None
    json_schema: AnswerSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.type is None:
            raise refuse("response_format", "lacks its type", "missing_required_parameter")
        if self.type not in ("text", "json_object", "json_schema"):
            message = f"response_format.type must be text, json_object or json_schema, not {self.type!r:.40}"
            raise UsageError(message, param="response_format", code="unsupported_value")
        for name, kind in (("value", "json_object"), ("json_schema", "json_schema")):
            if getattr(self, name) is not None and self.type != kind:
                raise refuse(
                    f"response_format.{name}", f"cannot be combined with the type {self.type}", "unsupported_parameter"
                )
        if self.type == "text" and self.schema_ is not None:
            raise refuse("response_format.schema", "cannot be combined with the type text", "unsupported_parameter")
        if len(self._schemas) > 1:
            raise refuse("response_format", "has two schemas; give one of them", "invalid_value")
        if self.type == "json_schema" and not self._schemas:
            reason = "lacks json_schema.schema, the JSON schema of the answer"
            raise refuse("response_format", reason, "missing_required_parameter")
        return self

    @property
    def _schemas(self) -> list[Any]:
        found = (self.value, self.schema_, None if self.json_schema is None else self.json_schema.schema_)
        return [schema for schema in found if schema is not None]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of StructuredOutputsParams. Plain text has none."""
        if self._schemas:
            return {"json": self._schemas[0]}
        return {"json_object": True} if self.type == "json_object" else {}


class StreamOptions(NullIsAbsent):
    """Options of a stream.

    include_usage: send a last chunk with the usage
    continuous_usage_stats: include the usage so far in every chunk
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(with_parameters(AnsweredFields, *_PARAMETERS, "length_penalty"), OtherSamplers, LlamaDrafts):  # type: ignore[misc]
    """The fields that chat and text requests share."""

    stream_options: StreamOptions | None = None
    stop: Text | list[Text] | None = None
    logit_bias: Annotated[dict[str, Any], Field(json_schema_extra=_BIAS)] | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    early_stopping: bool | Literal["never"] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Text | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    json_schema: dict[str, Any] | None = None
    grammar: Text | None = None
    n_predict: Int | None = None
    repeat_penalty: Number | None = None

    truncate_prompt_tokens: Annotated[Int, Field(json_schema_extra={"minimum": -1})] | None = None
    truncation_side: Literal["left", "middle", "right", "turns"] | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None

    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @model_validator(mode="after")
    def _check_values(self) -> SamplingFields:
        self.refuse_samplers()
        options = self.stream_options
        if not self.stream and options is not None and True in (options.include_usage, options.continuous_usage_stats):
            raise refuse("stream_options", "needs stream: true", "invalid_value")
        for name, is_refused in (
            ("store: true", self.store),
            ("spaces_between_special_tokens: false", self.spaces_between_special_tokens is False),
            ("stream_options.include_obfuscation: true", self.has_stream_option("include_obfuscation")),
        ):
            if is_refused:
                raise UsageError(f"{name} is not supported", param=name.partition(":")[0], code="unsupported_value")
        limit = self.truncate_prompt_tokens
        if limit is not None and (limit < -1 or limit == 0):
            reason = f"is {limit}; it must be at least 1, or -1 for as many as fit"
            raise refuse("truncate_prompt_tokens", reason, "integer_below_min_value")
        if self.truncation_side is not None and limit is None:
            raise UsageError("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        return self

    @property
    def given_parameters(self) -> frozenset[str]:
        """The parameters that the request sets; see `Common.given`."""
        aliases = {name for alias, name in _ALIASES.items() if getattr(self, alias, None) is not None}
        return frozenset(given(self, *_PARAMETERS)) | aliases

    @property
    def is_followed(self) -> bool:
        """True if the request follows its progress; see `GenerationRequest.is_followed`."""
        return bool(self.stream and (self.timings_per_token or self.return_progress))

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to report with each token, or None for no log-probabilities."""
        raise NotImplementedError

    def has_stream_option(self, name: str) -> bool:
        return bool(getattr(self.stream_options, name, None))

    def sampling_params(self, default_max_tokens: int | None) -> tuple[SamplingParams | BeamSearchParams, str]:
        """Return the parameters, and the name of the field that constrains the answer. If the engine finds an error in
        the constraint, the error names this field.

        default_max_tokens: the route's default. None, like -1 in a request, means up to the end of the context.

        Raises UsageError naming the field whose value is invalid.
        """
        arguments = {name: value for name, value in given(self, *_PARAMETERS).items() if (name, value) != ("stop", "")}
        own_names = self._add_aliases(arguments)
        limit = arguments.get("max_tokens", None if "max_tokens" in self.model_fields_set else default_max_tokens)
        arguments["max_tokens"] = None if limit == -1 else limit
        if self.logit_bias is not None:
            bias = self.logit_bias.items()
            arguments["logit_bias"] = {int(key) if _TOKEN_ID.fullmatch(key) else key: value for key, value in bias}
        constraint_field, structured_outputs = self._constraint()
        arguments["logprobs"] = self.num_top_logprobs
        try:
            params = SamplingParams(**arguments, structured_outputs=structured_outputs)
        except UsageError as error:
            raise rename_fields(error, own_names) from None
        if self.use_beam_search:
            return self._beam_search_params(params, constraint_field), constraint_field
        for name in given(self, *_BEAM_FIELDS):
            raise UsageError(f"{name} needs use_beam_search: true", param=name, code="invalid_value")
        return params, constraint_field

    def _add_aliases(self, arguments: dict[str, Any]) -> dict[str, str]:
        """Add the parameters that were given under other names, and return those names by parameter."""
        found: dict[str, str] = {}
        for alias, name in _ALIASES.items():
            if (value := getattr(self, alias, None)) is not None and name not in arguments:
                arguments[name], found[name] = value, alias
            elif value is not None and value != arguments[name]:
                reason = f"is {arguments[name]} and {alias} is {value}; give one of them"
                raise refuse(found.get(name, name), reason, "invalid_value")
        return found

    def _beam_search_params(self, params: SamplingParams, constraint_field: str) -> BeamSearchParams:
        for item in fields(params):
            value = getattr(params, item.name)
            if item.name not in _BEAM_PARAMS and value not in (item.default, _NEUTRAL.get(item.name, item.default)):
                name = constraint_field if item.name == "structured_outputs" else item.name
                message = f"{name} cannot be combined with use_beam_search; leave one of them out"
                raise UsageError(message, param=name, code="unsupported_value")
        return BeamSearchParams(
            beam_width=params.n,
            n=params.n,
            max_tokens=2**31 - 1 if params.max_tokens is None else params.max_tokens,
            ignore_eos=params.ignore_eos,
            skip_special_tokens=params.skip_special_tokens,
            **given(self, *_BEAM_FIELDS),
        )

    def _constraint(self) -> tuple[str, StructuredOutputsParams | None]:
        """Return the name of the field that constrains the answer, and its constraint. Raises UsageError if there are
        several.
        """
        found: dict[str, dict[str, Any]] = {}
        if (outputs := self.structured_outputs) is not None:
            found["structured_outputs"] = {name.rstrip("_"): value for name, value in outputs if value is not None}
        found |= {field: {_GUIDED[field]: value} for field, value in given(self, *_GUIDED).items()}
        if self.response_format is not None and (arguments := self.response_format.arguments()):
            found["response_format"] = arguments
        if len(found) > 1:
            message = f"{' and '.join(found)} contradict each other; give one of them"
            raise UsageError(message, param="structured_outputs", code="invalid_value")
        for name, arguments in found.items():
            for kind, check in (("grammar", check_grammar), ("json", _check_schema)):
                if kind in arguments:
                    check(arguments[kind], f"{name}.{kind}" if name == "structured_outputs" else name)
            with constraint_named(name):
                return name, StructuredOutputsParams(**arguments)
        return "structured_outputs", None


def check_grammar(text: Any, param: str) -> None:
    """Raise UsageError for an invalid GBNF grammar, before the request waits for the engine. The engine checks all
    other grammars.
    """
    try:
        if is_gbnf(text):
            parse_gbnf(text)
    except (GbnfError, RecursionError) as error:
        raise refuse(param, f"is not a grammar in GBNF: {error}", "invalid_grammar") from None


def _check_schema(schema: Any, param: str) -> None:
    """Check a JSON schema, which may also be a string, as in vLLM."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            message = f"{param} is not the text of a JSON schema: {error}"
            raise UsageError(message, param=param, code="invalid_json_schema") from None
    check_schema(schema, param)
