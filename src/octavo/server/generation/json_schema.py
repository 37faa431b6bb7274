"""The enforceable part of JSON Schema, checked before a request costs anything.

No constraint is accepted and then ignored: a keyword that cannot be enforced is refused with its JSON pointer.
llguidance's documentation lists the keywords that it enforces ("JSON schema -> llguidance converter"). The checks here
name the location and the remedy; llguidance makes the final check, without a tokenizer, in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits
from msgspec import Meta

from octavo.engine.texts.deep_stack import run_on_deep_stack
from octavo.engine.texts.patterns import PatternError, translate_pattern
from octavo.engine.texts.schemas import UnenforceableError, enforceable_schema, escaped, resolve
from octavo.server.errors import refuse
from octavo.server.generation.spec import NamedTool, ToolChoice
from octavo.server.generation.well_formed_schema import (
    TYPES,
    SchemaError,
    SchemaNode,
    check_size,
    check_type,
    check_type_names,
    check_well_formed,
    find_schemas,
    same_value,
    schemas_of,
    shown,
)

MAX_PROPERTIES = 5000  # in all objects together
MAX_PROPERTIES_OF_ONE = 2048
MAX_MINIMUM = 10_000  # for minLength, minItems, minProperties
MAX_MAXIMUM = 2**31 - 1  # for maxLength, maxItems, maxProperties
MAX_EXACT_NUMBER = 2**53
MAX_PATTERN_CHARS = 8192
MAX_TOOLS = 128

# The limits of the engine's compiler.
_LIMITS = LLParserLimits(initial_lexer_fuel=300_000, max_grammar_size=50_000, verbose_errors=False)
_TIMEOUT_S = 2.0

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,200}")

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
# Drafts before 6 do not have `const` and would ignore it.
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[67]/schema|draft/(2019-09|2020-12)/schema)#?")
_BEFORE_2020 = re.compile(r".*(draft-0[67]|2019-09)")

# The keywords that are enforced, with the type of their value.
_MANY = Annotated[list[Any], Meta(min_length=1)]
_SCHEMA_LISTS = dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), _MANY)
_SCHEMA_MAPS: dict[str, Any] = {
    **dict.fromkeys(("patternProperties", "$defs", "definitions"), dict[str, Any]),
    "properties": Annotated[dict[str, Any], Meta(max_length=MAX_PROPERTIES_OF_ONE)],
}
_SCHEMAS = {
    **dict.fromkeys(("additionalProperties", "additionalItems"), dict[str, Any] | bool),
    "items": dict[str, Any] | bool | _MANY,
}
_NUMBERS = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), float),
    "multipleOf": Annotated[float, Meta(gt=0)],
    "const": Any,
}
_KEYWORDS: dict[str, Any] = {
    **_SCHEMA_LISTS,
    **_SCHEMA_MAPS,
    **_SCHEMAS,
    **_NUMBERS,
    "type": str | _MANY,
    "enum": _MANY,
    "required": list[str],
    **dict.fromkeys(("$ref", "$schema", "pattern", "format"), str),
    **dict.fromkeys(("minLength", "minItems", "minProperties"), Annotated[int, Meta(ge=0, le=MAX_MINIMUM)]),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), Annotated[int, Meta(ge=0, le=MAX_MAXIMUM)]),
}

# Keywords that do not restrict values: JSON Schema's annotations, then OpenAPI's and editors'.
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_ANNOTATIONS |= {"$anchor", "$vocabulary", "$id", "id", "contentMediaType", "contentEncoding", "contentSchema"}
_ANNOTATIONS |= {"example", "externalDocs", "xml", "discriminator", "markdownDescription", "enumDescriptions"}
_REMEDIES = {
    "nullable": 'write "type": [..., "null"] instead',
    "not": "list what is allowed instead",
    **dict.fromkeys(
        ("if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        "use anyOf with one schema for each case",
    ),
    "propertyNames": "use patternProperties with additionalProperties: false",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "uniqueItems": "leave it out and check the answer",
    "contains": "leave it out and check the answer",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}


class BlocksLoopError(RuntimeError):
    """A schema check was attempted on an event loop's thread, where it would block the loop. Use another thread."""


def check_schema(schema: object, param: str, *, is_enforced: bool = True) -> None:
    """Check a JSON schema in a request.

    param: the field that contains the schema
    is_enforced: whether every keyword must be enforceable. Otherwise the schema only describes something, such as the
    arguments of a tool that is not `strict`, and only has to be well-formed.

    Raises UsageError(param=param, code="invalid_json_schema"), naming the JSON pointer and the remedy, for:

    - malformed or unknown keywords,
    - a `$ref` to another document, to nothing, or in an endless circle (references are never fetched),
    - a schema that no value satisfies,
    - more than 512 Ki characters, 96 levels, 5,000 properties in total or 2,048 in one object,
    - minimum lengths above 10,000 and maximum lengths above 2^31 - 1.

    The check may take seconds. On an event loop's thread it raises BlocksLoopError instead.
    """
    if asyncio._get_running_loop() is not None:
        raise BlocksLoopError(f"{param} is checked on the event loop's thread")
    try:
        if not is_enforced:
            check_well_formed(schema)
            return
        check_size(schema)
        _Checker(schema).check()
        _compile(schema)
    except SchemaError as error:
        raise refuse(param, f"is not a usable JSON schema: {error}", "invalid_json_schema") from None


def check_tools(tools: Sequence[Mapping[str, Any]], param: str = "tools") -> None:
    """Check the tools of a request, in OpenAI's format with types already checked.

    The parameters of a `strict` tool must be enforceable. Unlike OpenAI, this does not require every property to be
    required or additional properties to be forbidden. The parameters of other tools only describe the arguments and
    just have to be well-formed.

    Raises UsageError, with a param such as `tools[0].function.name`, for more than 128 tools, for a name that is not
    unique or does not consist of 1 to 200 letters, digits, underscores or hyphens, and for parameters that are not the
    schema of an object.
    """
    if len(tools) > MAX_TOOLS:
        raise refuse(param, f"has {len(tools):,} entries; at most {MAX_TOOLS} are allowed", "array_above_max_length")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool["function"]
        name, place = function["name"], f"{param}[{index}].function"
        if not _TOOL_NAME.fullmatch(name):
            reason = f"is {shown(name)}; it must be 1 to 200 letters, digits, underscores or hyphens"
            raise refuse(f"{place}.name", reason, "invalid_value")
        if name in seen:
            reason = f"is {shown(name)}, the name of an earlier tool; names must differ"
            raise refuse(f"{place}.name", reason, "invalid_value")
        seen.add(name)
        if (parameters := function.get("parameters")) is not None:
            check_schema(parameters, f"{place}.parameters", is_enforced=bool(function.get("strict")))
            types = parameters.get("type", "object") if isinstance(parameters, dict) else ()
            if "object" not in ([types] if isinstance(types, str) else types):
                reason = 'must have "type": "object", because arguments have names'
                raise refuse(f"{place}.parameters", reason, "invalid_json_schema")


def check_tool_choice(tool_choice: ToolChoice, tools: Sequence[Mapping[str, Any]], param: str = "tool_choice") -> None:
    """Raise UsageError if a tool must be called but the request has no tools, or none with that name."""
    if tool_choice == "required" and not tools:
        reason = f"is required, but the request has no tools: add tools or leave {param} out"
        raise refuse(param, reason, "invalid_value")
    if isinstance(tool_choice, NamedTool) and all(tool["function"]["name"] != tool_choice.name for tool in tools):
        reason = f"names {shown(tool_choice.name)}, but the request has no such tool among its {len(tools)}"
        raise refuse(param, reason, "invalid_value")


class _Checker:
    """Checks that a schema can be enforced."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._is_before_2020 = isinstance(root, dict) and bool(_BEFORE_2020.match(str(root.get("$schema", ""))))

    def check(self) -> None:
        schemas = find_schemas(self._root, self._check_keyword)
        objects = [schema for schema in schemas.values() if isinstance(schema, dict)]
        if sum(len(schema.get("properties", ())) for schema in objects) > MAX_PROPERTIES:
            raise SchemaError("", f"has more than {MAX_PROPERTIES:,} properties")
        if (endless := _find_endless(schemas)) is not None:
            raise SchemaError(endless, "needs another value inside each value, so no value is ever complete")

    def _check_keyword(self, keyword: str, value: Any, place: str, schema: dict[str, Any]) -> Iterator[SchemaNode]:
        _check_value(keyword, value, place)
        if keyword == "$ref":
            yield self._referred(value, place)
        elif keyword in _KEYWORDS:
            yield from schemas_of(keyword, value, place)
        if keyword in ("pattern", "patternProperties"):
            for pattern in [value] if keyword == "pattern" else value:
                _check_pattern(pattern, place)
        self._check_enforceable(keyword, value, place, schema)

    def _check_enforceable(self, keyword: str, value: Any, place: str, schema: dict[str, Any]) -> None:
        if keyword == "format" and schema.get("type", "string") not in ("number", "integer", "boolean"):
            if value not in FORMATS:
                raise SchemaError(place, f"is {shown(value)}; the supported formats are {', '.join(FORMATS[:-1])}")
        elif keyword == "prefixItems" and (self._is_before_2020 or "additionalItems" in schema):
            raise SchemaError(place, "belongs to draft 2020-12, where items replaces additionalItems")
        elif keyword in ("anyOf", "oneOf"):
            # The compiler follows all alternatives at once. Reaching its limit would end an answer in the middle.
            if (number := sum(map(self._num_optional, value))) > MAX_PROPERTIES_OF_ONE:
                reason = f"has alternatives with {number:,} optional properties in total"
                raise SchemaError(place, f"{reason}; at most {MAX_PROPERTIES_OF_ONE:,} can be enforced")
        elif keyword in ("$id", "id") and place.count("/") > 1:
            raise SchemaError(place, "within a schema would change what its references mean; leave it out")
        elif keyword in _REMEDIES:
            raise SchemaError(place, f"is not supported: {_REMEDIES[keyword]}")
        elif keyword not in _KEYWORDS and keyword not in _ANNOTATIONS and not keyword.startswith("x-"):
            raise SchemaError(place, "is not a keyword that can be enforced; leave it out")

    def _num_optional(self, schema: Any) -> int:
        """Return the number of optional properties of an alternative. The alternative has not been checked yet, and it
        may be a reference.
        """
        if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            schema = resolve(self._root, reference) if reference.startswith("#") else None
        if not isinstance(schema, dict) or not isinstance(properties := schema.get("properties"), dict):
            return 0
        required = schema.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        return len(properties.keys() - needed)

    def _referred(self, reference: str, place: str) -> SchemaNode:
        """Return the schema that `$ref` names."""
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaError(place, f"is {shown(reference)}; only references within the schema (#/...) are followed")
        node = resolve(self._root, reference)
        if not isinstance(node, (dict, bool)):
            raise SchemaError(place, f"is {shown(reference)}, which does not exist")
        return node, unquote(reference[1:])


def _check_value(keyword: str, value: Any, place: str) -> None:
    """Check that a keyword's value is well-formed, regardless of the rest of the schema."""
    if keyword == "x-guidance":
        raise SchemaError(place, "is not supported in requests; leave it out")
    if keyword in _NUMBERS:
        _check_exact(value, place)
    check_type(value, _KEYWORDS.get(keyword, Any), place)
    if keyword == "enum":
        for index, item in enumerate(value):
            _check_exact(item, f"{place}/{index}")
    elif keyword == "type":
        check_type_names(value, TYPES, place)
    elif keyword == "$schema" and not _DRAFTS.fullmatch(value):
        raise SchemaError(
            place, f"is {shown(value)}; the supported drafts of JSON Schema are 6, 7, 2019-09 and 2020-12"
        )


def _check_exact(value: object, place: str) -> None:
    """Refuse integers that a double would round, because numbers are compared as doubles."""
    if isinstance(value, int) and abs(value) > MAX_EXACT_NUMBER:
        raise SchemaError(place, f"is {shown(value)}; integers beyond 2^53 cannot be distinguished")


def _check_pattern(pattern: str, place: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise SchemaError(place, f"has {len(pattern):,} characters; the limit is {MAX_PATTERN_CHARS:,}")
    try:
        error = _compile_error({"type": "string", "pattern": translate_pattern(pattern)})
    except PatternError as found:
        error = str(found)
    if error:
        reason = error.strip().splitlines()[-1].removeprefix("error: ")
        raise SchemaError(place, f"is {shown(pattern)} and cannot be used: {reason}")


def _compile(schema: object) -> None:
    """Run the compiler's own checks for overlapping alternatives, contradictions and grammars that are too large."""
    try:
        schema = enforceable_schema(schema) if isinstance(schema, dict) else schema
    except UnenforceableError as found:
        raise SchemaError(found.pointer, found.problem) from None
    # The compiler recurses once for each schema that refers to another.
    error = run_on_deep_stack(lambda: _compile_error(schema), _TIMEOUT_S)
    if error is None:
        raise SchemaError("", f"takes longer than {_TIMEOUT_S:g} s to compile: simplify it")
    if error.startswith("oneOf"):
        raise SchemaError("", "has a oneOf whose members may overlap, which cannot be enforced: use anyOf")
    if error:
        raise SchemaError("", f"cannot be enforced: {' '.join(error.split())}")


def _compile_error(schema: object) -> str:
    """Return llguidance's error message, or an empty string if there is none."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher.validate_grammar(grammar, limits=_LIMITS).partition("\n<")[0].strip()


def _find_endless(schemas: Mapping[str, Any]) -> str | None:
    """Return the pointer to a schema that has no finite value, because each of its values must contain another value of
    the same schema. Return None if there is no such schema. Takes linear time.
    """
    open_groups: dict[str, set[int]] = {}
    users: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for pointer, schema in schemas.items():
        groups = _needs(schema, pointer)
        open_groups[pointer] = set(range(len(groups)))
        for index, group in enumerate(groups):
            for member in group:
                users[member].append((pointer, index))
    finite = [pointer for pointer, groups in open_groups.items() if not groups]
    for end in finite:
        for pointer, index in users[end]:
            if index in open_groups[pointer]:
                open_groups[pointer].remove(index)
                if not open_groups[pointer]:
                    finite.append(pointer)
    return next((pointer for pointer, groups in open_groups.items() if groups), None)


def _needs(schema: Any, pointer: str) -> list[list[str]]:
    """Return groups of schemas. This schema has a finite value only if at least one schema in each group has one."""
    if isinstance(schema, bool) or "enum" in schema or "const" in schema:
        return []
    places: list[str] = []
    if schema.get("type") in ("object", ["object"]):
        properties = schema.get("properties", {})
        places = [f"properties/{escaped(name)}" for name in schema.get("required", ()) if name in properties]
    elif schema.get("type") in ("array", ["array"]):
        places = _needed_items(schema)
    return [*same_value(schema, pointer), *([f"{pointer}/{place}"] for place in places)]


def _needed_items(schema: dict[str, Any]) -> list[str]:
    """Return pointers to the schemas of an array's mandatory items."""
    num_needed, items = schema.get("minItems", 0), schema.get("items")
    keyword, prefix = ("items", items) if isinstance(items, list) else ("prefixItems", schema.get("prefixItems", []))
    needed = [f"{keyword}/{index}" for index in range(min(num_needed, len(prefix)))]
    return [*needed, "items"] if isinstance(items, dict) and num_needed > len(prefix) else needed
