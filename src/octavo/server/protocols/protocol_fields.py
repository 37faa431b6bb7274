"""Unions in request bodies, told apart by their type."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from octavo.errors import UsageError
from octavo.server.http.json_body import quote

_UNSUPPORTED = "unsupported"


def _refuse_type(value: str) -> str:
    raise UsageError(f"the type {quote(value)} is not supported here", code="unsupported_value")


class Unsupported(BaseModel):
    """An object of an unknown type. Its `type` is what the error names."""

    # Nothing fits it in the OpenAPI document either. Otherwise a known type would fit two branches of a `oneOf`.
    model_config = ConfigDict(strict=True, json_schema_extra={"not": {}})

    type: Annotated[str, AfterValidator(_refuse_type)]


class ByType:
    """Annotates a union of strings, lists and objects. The objects are told apart by their `type`.

    An object without a type is the member that does not require one; an object of an unknown type is refused.
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
                kind = getattr(value, "type", next(iter(tagged)))  # of a model, or of a value that is not an object
            return kind if isinstance(kind, str) and kind in tagged else _UNSUPPORTED

        if "list" not in tagged:
            tagged[_UNSUPPORTED] = Unsupported
        choices = tuple(Annotated[member, Tag(name)] for name, member in tagged.items())
        return handler.generate_schema(Annotated[Union[choices], Discriminator(tag)])  # noqa: UP007


def _literals(annotation: Any) -> list[str]:
    """The names that a `Literal`, or a union with one, allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [name for part in get_args(annotation) for name in _literals(part)]
