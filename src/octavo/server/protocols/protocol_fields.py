"""The fields of request bodies: absent fields, options, sampling parameters, and unions distinguished by type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema

from octavo.errors import UsageError
from octavo.generation_request import RequestOptions
from octavo.sampling_params import MAX_LOGPROBS, MAX_STRING_CHARS, BeamSearchParams, SamplingParams
from octavo.server.generation.spec import ChatSpec, TextSpec
from octavo.server.http.json_body import WHOLE, WHOLE_NUMBERS, Int, Number, RequestModel, Text, quote

_UNSUPPORTED = "unsupported"

NULL_EXTRAS: dict[str, Any] = {"additionalProperties": {"type": "null"}}
_TokenId: TypeAlias = Annotated[int, Field(json_schema_extra={"minimum": 0})]
_String: TypeAlias = Annotated[Text, Field(json_schema_extra={"minLength": 1, "maxLength": MAX_STRING_CHARS})]
# By the type of a dataclass's field, without None. Strings are handled separately in `_field`.
_TYPES: dict[str, Any] = {
    "bool": bool,
    "int": Int,
    "float": Number,
    "Sequence[int]": Annotated[list[_TokenId], WHOLE_NUMBERS],
    "Sequence[str]": list[_String],
    "str | Sequence[str]": _String | list[_String],
}
# pydantic's limits for numbers and lists -> JSON Schema's.
_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "min_length": "minItems",
    "max_length": "maxItems",
}
NumLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]


class NullIsAbsent(RequestModel):
    """An object in a request. It may have unknown fields that are null, because clients send back objects with every
    field that they know.
    """

    model_config = ConfigDict(json_schema_extra=NULL_EXTRAS)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict) and None in data.values():
            return {name: item for name, item in data.items() if item is not None or name in cls.model_fields}
        return data


class Historic(NullIsAbsent):
    """A part of an earlier turn. Keys that other products have added to it are ignored."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})


def _field(item: dataclasses.Field[Any]) -> tuple[Any, None]:
    """Return an optional, nullable field for a field of a dataclass that checks its own values.

    Therefore the limits of its values are only shown in the OpenAPI document. Limits of strings are also checked here,
    because the dataclass treats an empty string as None.
    """
    kind = str(item.type).removesuffix(" | None")
    if kind == "str":
        return Annotated[Text, Field(**item.metadata)] | None, None
    limits = {_LIMITS[name]: limit for name, limit in item.metadata.items()}
    return Annotated[_TYPES[kind], Field(json_schema_extra=limits)] | None, None


def with_parameters(base: type[RequestModel], *names: str) -> Any:
    """Return a model that also has fields for the parameters with these names."""
    known = {item.name: item for params in (BeamSearchParams, SamplingParams) for item in dataclasses.fields(params)}
    added: dict[str, Any] = {name: _field(known[name]) for name in names}
    return create_model(base.__name__, __base__=base, **added)


_OPTIONS: dict[str, Any] = {item.name: _field(item) for item in dataclasses.fields(RequestOptions)}


class OptionFields(create_model("OptionFields", __base__=NullIsAbsent, **_OPTIONS)):  # type: ignore[misc]
    """The fields of `RequestOptions`, for `read_options`.

    ignored_fields: accepted fields that have no effect
    """

    ignored_fields: ClassVar[Set[str]] = frozenset()

    def find_ignored(self) -> list[str]:
        """Return the names of the given fields that have no effect."""
        return sorted(name for name in self.ignored_fields if getattr(self, name) is not None)


class AnsweredFields(OptionFields):
    """The fields of every request for an answer.

    model: None means the default model
    """

    model: Text | None = None
    stream: bool | None = None

    @property
    def own_names(self) -> Mapping[str, str]:
        """The protocol's names for the fields of the spec, where they differ."""
        return {}

    @property
    def adapter_scales(self) -> Sequence[tuple[int, float]] | None:
        """Adapters by number and their scales, as in llama.cpp's requests, or None if the request does not set them."""
        return None

    def to_spec(self, tenant: str) -> ChatSpec | TextSpec:
        """Return the model-independent request. Raises UsageError for fields that cannot be honoured."""
        raise NotImplementedError


def kind_of_inputs(value: Any) -> str:
    """Return the kind of one or more prompts or texts: text, texts, tokens or token lists."""
    if isinstance(value, str):
        return "text"
    first = value[0] if isinstance(value, list) and value else ""
    return "tokens" if isinstance(first, (int, float)) else "token lists" if isinstance(first, list) else "texts"


def _refuse_type(value: str) -> str:
    raise UsageError(f"the type {quote(value)} is not supported here", code="unsupported_value")


class Unsupported(BaseModel):
    """An object of an unknown type. The error names its `type`."""

    # Matches nothing in the OpenAPI document either. Otherwise a known type would match two branches of a `oneOf`.
    model_config = ConfigDict(strict=True, json_schema_extra={"not": {}})

    type: Annotated[str, AfterValidator(_refuse_type)]


class ByType:
    """Annotates a union of strings, lists and objects. The objects are distinguished by their `type`.

    An object without a type matches the member that does not require one. An object of an unknown type is refused.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tagged: dict[str, Any] = {}
        default = None
        for member in get_args(source) if get_origin(source) in (Union, UnionType) else (source,):
            if isinstance(member, type) and issubclass(member, BaseModel):
                field = member.model_fields["type"]
                names = _literals(field.annotation)
                tagged |= dict.fromkeys(names, member)
                default = default if field.is_required() else names[0]
            else:
                is_list = get_origin(get_args(member)[0] if get_origin(member) is Annotated else member) is list
                tagged["list" if is_list else "text"] = member

        def tag(value: Any) -> str:
            if isinstance(value, str) and "text" in tagged:
                return "text"
            if "list" in tagged:
                return "list"
            if isinstance(value, dict):
                kind = default if value.get("type") is None else value["type"]
            else:
                kind = getattr(value, "type", next(iter(tagged)))  # for a model, or a value that is not an object
            return kind if isinstance(kind, str) and kind in tagged else _UNSUPPORTED

        if "list" not in tagged:
            tagged[_UNSUPPORTED] = Unsupported
        choices = tuple(Annotated[member, Tag(name)] for name, member in tagged.items())
        return handler.generate_schema(Annotated[Union[choices], Discriminator(tag)])  # noqa: UP007


def _literals(annotation: Any) -> list[str]:
    """Return the names that a `Literal`, or a union with one, allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [name for part in get_args(annotation) for name in _literals(part)]
