"""Checks that JSON schemas of any draft are well-formed: their size, the values of their keywords, and their
references.

No more is needed for a schema that only describes something, such as the arguments of a tool whose calls are not
enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Annotated, Any
from urllib.parse import unquote, urljoin

import msgspec
from msgspec import Meta

from octavo.engine.texts.patterns import PatternError, check_pattern
from octavo.engine.texts.schemas import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, SCHEMAS, escaped, resolve

MAX_SCHEMA_CHARS = 512 << 10
MAX_SCHEMA_DEPTH = 96  # nested objects and arrays in the schema's JSON text
TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")

_MANY = Annotated[list[Any], Meta(min_length=1)]
# `any` and the booleans are from older drafts.
_TYPE_NAMES = {*TYPES, "any"}
_KEYWORDS: dict[str, Any] = {
    **dict.fromkeys(MAPS_OF_SCHEMAS, dict[str, Any]),
    "dependencies": dict[str, Any],
    **dict.fromkeys(LISTS_OF_SCHEMAS, _MANY),
    **dict.fromkeys(SCHEMAS, dict[str, Any] | bool),
    "items": dict[str, Any] | bool | list[Any],
    "type": str | list[str],
    "enum": list[Any],
    "required": list[str] | bool,
    **dict.fromkeys(("minimum", "maximum"), float),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), float | bool),
    **dict.fromkeys(("multipleOf", "divisibleBy"), Annotated[float, Meta(gt=0)]),
    **dict.fromkeys(("minLength", "minItems", "minProperties", "maxLength", "maxItems", "maxProperties"), float),
    **dict.fromkeys(("$ref", "$schema", "$id", "id", "$anchor", "pattern", "format"), str),
}
_LENGTH = re.compile("(min|max)(Length|Items|Properties)")

SchemaNode = tuple[object, str]
"""A schema within the schema, with its JSON pointer."""
CheckKeyword = Callable[[str, Any, str, dict[str, Any]], Iterable[SchemaNode]]
"""Checks a keyword, given its value, its pointer and its schema. Returns the schemas that it contains or refers to."""


class SchemaError(Exception):
    """A problem in a schema, with its JSON pointer."""

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(f"{pointer or 'the schema'} {message}"[:500])


def check_well_formed(schema: object) -> None:
    """Raise SchemaError for a schema that is not valid in any draft, is too large, or has a dangling reference."""
    check_size(schema)
    ids, anchors = _names_within(schema)

    def check_keyword(keyword: str, value: Any, place: str, _: dict[str, Any]) -> Iterator[SchemaNode]:
        _check_value(keyword, value, place)
        if keyword == "$ref":
            yield from _referred(schema, value, place, ids, anchors)
        yield from schemas_of(keyword, value, place)

    find_schemas(schema, check_keyword)


def find_schemas(root: object, check_keyword: CheckKeyword) -> dict[str, Any]:
    """Return the schema and all schemas within it, by pointer. Each of them is an object or a boolean.

    The search is not recursive, because the schema is not trusted. Raises SchemaError for a schema of any other type,
    and for one that refers to itself in a circle.
    """
    stack: list[SchemaNode] = [(root, "")]
    schemas: dict[str, Any] = {}
    while stack:
        node, pointer = stack.pop()
        if pointer in schemas:
            continue
        schemas[pointer] = node
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise SchemaError(pointer, f"must be an object or a boolean, not {shown(node)}")
        for keyword, value in node.items():
            stack += check_keyword(keyword, value, f"{pointer}/{escaped(keyword)}", node)
    if (circle := _find_circle(schemas)) is not None:
        raise SchemaError(circle, "refers to itself without end")
    return schemas


def check_size(schema: object) -> None:
    """Refuse schemas that are too large or too deep before anything walks through them."""
    level: list[object] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise SchemaError("", f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        containers = (item for item in level if isinstance(item, (dict, list)))
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    try:
        num_chars = len(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SchemaError("", f"is not valid JSON: {error}") from None
    if num_chars > MAX_SCHEMA_CHARS:
        raise SchemaError("", f"has {num_chars:,} characters; the limit is {MAX_SCHEMA_CHARS:,}")


def check_type(value: object, kind: Any, place: str) -> None:
    """Raise SchemaError if a keyword's value has the wrong type.

    kind: one of msgspec's types
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        expected = str(error).replace("Expected", "expected", 1)
        raise SchemaError(place, f"is {shown(value)}; {expected}") from None


def check_type_names(value: Any, names: set[str] | tuple[str, ...], place: str) -> None:
    """Raise SchemaError if the value of `type` names any other type than these."""
    for name in value if isinstance(value, list) else [value]:
        if name not in names:
            raise SchemaError(place, f"is {shown(name)}; types are {', '.join(TYPES)}")


def schemas_of(keyword: str, value: Any, place: str) -> Iterator[SchemaNode]:
    """Yield the schemas in a keyword's value with their pointers. The value's type has already been checked."""
    if keyword in MAPS_OF_SCHEMAS:
        yield from ((item, f"{place}/{escaped(name)}") for name, item in value.items())
    elif keyword in LISTS_OF_SCHEMAS or (keyword == "items" and isinstance(value, list)):
        yield from ((item, f"{place}/{index}") for index, item in enumerate(value))
    elif keyword in SCHEMAS:
        yield value, place


def shown(value: object) -> str:
    """Return a shortened representation of a value, for messages."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "an integer of more than 20 digits"
    text = json.dumps(value, ensure_ascii=True, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _find_circle(schemas: Mapping[str, Any]) -> str | None:
    """Return the pointer to a schema that leads back to itself for the same value, or None if there is none."""
    targets = {pointer: list(chain(*same_value(schema, pointer))) for pointer, schema in schemas.items()}
    try:
        TopologicalSorter(targets).prepare()
    except CycleError as error:
        return str(error.args[1][0])
    return None


def same_value(schema: Any, pointer: str) -> list[list[str]]:
    """Return groups of schemas that apply to the same value as this schema. The value has to satisfy at least one
    schema in each group.
    """
    if isinstance(schema, bool):
        return []
    members = {
        keyword: [f"{pointer}/{keyword}/{index}" for index in range(len(schema.get(keyword, ())))]
        for keyword in ("allOf", "anyOf", "oneOf")
    }
    referred = [[unquote(schema["$ref"][1:])]] if "$ref" in schema else []
    return [*referred, *([member] for member in members["allOf"]), *filter(None, (members["anyOf"], members["oneOf"]))]


def _check_value(keyword: str, value: Any, place: str) -> None:
    check_type(value, _KEYWORDS.get(keyword, Any), place)
    if keyword == "type":
        check_type_names(value, _TYPE_NAMES, place)
    elif _LENGTH.fullmatch(keyword) and (value < 0 or value != int(value)):
        raise SchemaError(place, f"is {shown(value)}; expected an integer >= 0")
    for pattern in [value] if keyword == "pattern" else value if keyword == "patternProperties" else ():
        _check_pattern(pattern, place)


def _check_pattern(pattern: str, place: str) -> None:
    """Raise SchemaError if the pattern is not a regular expression in either ECMA-262 or Python."""
    try:
        check_pattern(pattern)
    except PatternError as error:
        with suppress(re.error, RecursionError, OverflowError):
            re.compile(pattern)
            return
        raise SchemaError(place, f"is {shown(pattern)}, not a regular expression: {error}") from None


def _names_within(schema: object) -> tuple[set[str], set[str]]:
    """Return the ids and the anchors anywhere in a schema. References may use them to name its parts."""
    ids, anchors = {""}, set()
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            waiting += node.values()
            anchors |= {str(node.get(keyword, "")) for keyword in ("$anchor", "$dynamicAnchor")}
            for keyword in ("$id", "id"):
                base, _, anchor = str(node.get(keyword, "")).partition("#")
                ids.add(base)
                anchors.add(anchor)
    return ids, anchors - {""}


def _referred(root: Any, reference: str, place: str, ids: set[str], anchors: set[str]) -> Iterator[SchemaNode]:
    """Yield the schema that a reference names by a pointer from the root. References by id or anchor yield nothing.

    Raises SchemaError if a reference names no part of the root.
    """
    base, _, fragment = reference.partition("#")
    root_id = str(root.get("$id", root.get("id", "")))
    if base not in ids and urljoin(root_id, base) not in {urljoin(root_id, name) for name in ids}:
        raise SchemaError(place, f"is {shown(reference)}; only references within the schema (#/...) are followed")
    if base or (fragment and not fragment.startswith("/")):
        if not base and unquote(fragment) not in anchors:
            raise SchemaError(place, f"is {shown(reference)}, which does not exist")
        return
    node = resolve(root, reference)
    if isinstance(node, (dict, bool)):
        yield node, unquote(fragment)
    elif len(ids) == 1:  # otherwise it may start at a part with an id
        raise SchemaError(place, f"is {shown(reference)}, which does not exist")
