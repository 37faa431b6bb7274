"""Rewrites JSON schemas so that llguidance enforces everything they require.

llguidance accepts some schemas and then lets through values that violate them. Here patterns are translated
(`patterns.translate_pattern`), dates become patterns that know leap years, escapes that spell a name a second time are
forbidden, and what cannot be fixed is rejected with its JSON pointer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any
from urllib.parse import unquote

from octavo.engine.texts.patterns import PatternError, translate_pattern

OPTIONS = "x-guidance"
"""The keyword that contains llguidance's options."""

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS_OF_SCHEMAS = ("prefixItems", "allOf", "anyOf", "oneOf")
SCHEMAS = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")

_OBJECT_KEYWORDS = {"properties", "patternProperties", "additionalProperties", "required", "minProperties"}
_OBJECT_KEYWORDS |= {"maxProperties", "unevaluatedProperties"}
_SPEAKS_OF_OTHERS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
# Control characters that JSON has no letter for, as `json.dumps` writes them.
_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:0[0-7bef]|1[0-9a-f])|\x7f")
# Without `u`: keys that a schema does not name could spell a name as `\\u0061`.
_ESCAPES_BY_ONE_LETTER = 'nrbtf\\"'

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
# A leap second is only valid at the end of a few days.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
_MAX_HOST_NAME = 253

# Tokens of a Lark grammar where `%json` is not a keyword, and that keyword.
_LARK_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s]+>|(%json)\s*', re.DOTALL)


class UnenforceableError(ValueError):
    """Part of a schema that cannot be enforced.

    pointer: its JSON pointer.
    """

    def __init__(self, pointer: str, problem: str) -> None:
        super().__init__(f"{pointer} {problem}")
        self.pointer = pointer
        self.problem = problem


def enforceable_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for llguidance that allows no value that `schema` forbids.

    With llguidance's option `lenient`, constraints that cannot be enforced are left out. Otherwise they raise
    UnenforceableError.
    """
    mended: dict[str, Any] = json.loads(json.dumps(schema))
    options = mended.get(OPTIONS)
    is_lenient = isinstance(options, dict) and bool(options.get("lenient"))
    waiting: list[tuple[Any, str]] = [(mended, "")]
    seen: set[int] = set()
    names_could_repeat, control_place = False, ""
    while waiting:
        node, pointer = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        waiting += _schemas_within(mended, node, pointer)
        names_could_repeat |= _names_could_repeat(node)
        control_place = control_place or next(
            (f"{pointer}/{name}" for name in ("const", "enum") if _CONTROL.search(json.dumps(node.get(name)))), ""
        )
        _mend_patterns(node, pointer, is_lenient=is_lenient)
        _mend_format(node)
        _mend_least_properties(node, pointer, is_lenient=is_lenient)
    if names_could_repeat and control_place and not is_lenient:
        problem = "has control characters, which needs additionalProperties: false in all objects of the schema"
        raise UnenforceableError(control_place, problem)
    if names_could_repeat and not control_place:
        given = options if isinstance(options, dict) else {}
        mended[OPTIONS] = {**given, "json_allowed_escapes": _ESCAPES_BY_ONE_LETTER}
    return mended


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with its objects closed to properties that it does not name.

    Objects for which the schema mentions other properties stay open, and objects without `properties` stay unchanged.
    If an object is described by several schemas (`allOf`, or `anyOf` next to `properties`), the properties that any of
    them names are allowed.
    """
    closed: dict[str, Any] = json.loads(json.dumps(schema))
    waiting: list[tuple[Any, bool]] = [(closed, False)]
    found: dict[tuple[int, bool], dict[str, Any]] = {}  # by whether the schema describes a value with others
    while waiting:
        node, is_part = waiting.pop()
        if not isinstance(node, dict) or (id(node), is_part) in found:
            continue
        found[id(node), is_part] = node
        groups = _same_value(closed, node)
        are_parts = is_part or len(groups) + bool(_OBJECT_KEYWORDS & node.keys()) > 1
        waiting += [(part, are_parts) for part in chain(*groups)]
        same = {id(part) for part in chain(*groups)}
        waiting += [(part, False) for part, _ in _schemas_within(closed, node, "") if id(part) not in same]
    alone = [node for (key, is_part), node in found.items() if not is_part and (key, True) not in found]
    names = [_all_names(closed, node) for node in alone]  # before any is closed
    for node, named in zip(alone, names, strict=True):
        if named:
            node["properties"] = _properties(node) | {name: {} for name in named if name not in _properties(node)}
            node["additionalProperties"] = False
    return closed


def _same_value(root: dict[str, Any], node: dict[str, Any]) -> list[list[Any]]:
    """Return the other schemas that describe the same value as this one, as lists of alternatives.

    They come from `allOf`, `anyOf`, `oneOf` and `$ref`.
    """
    lists = {keyword: value for keyword, value in node.items() if isinstance(value, list)}
    groups = [[member] for member in lists.get("allOf", ())]
    groups += [lists[keyword] for keyword in ("anyOf", "oneOf") if keyword in lists]
    return groups + ([[resolve(root, node["$ref"])]] if "$ref" in node else [])


def _properties(node: dict[str, Any]) -> dict[str, Any]:
    found = node.get("properties")
    return found if isinstance(found, dict) else {}


def _all_names(root: dict[str, Any], node: dict[str, Any]) -> dict[str, None]:
    """Return the properties named by a schema and by the schemas that describe the same value.

    The result is empty if one of them has a rule for properties that it does not name. It is also empty if the names
    come only from alternatives, because each alternative can be closed on its own.
    """
    groups = _same_value(root, node)
    if len(groups) == 1 and not _OBJECT_KEYWORDS & node.keys():
        return {}
    names: dict[str, None] = {}
    waiting, seen = [node], set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        if _SPEAKS_OF_OTHERS & part.keys():
            return {}
        seen.add(id(part))
        names |= dict.fromkeys(_properties(part))
        waiting += chain(*_same_value(root, part))
    return names


def enforceable_lark(grammar: str) -> str:
    """Return a Lark grammar whose `%json` schemas are enforceable, see `enforceable_schema`."""
    if "%json" not in grammar:
        return grammar
    decoder = json.JSONDecoder()
    parts: list[str] = []
    copied = at = 0
    while found := _LARK_TOKENS.search(grammar, at):
        at = found.end()
        if found[1] is None:
            continue
        try:
            schema, end = decoder.raw_decode(grammar, at)
        except (ValueError, RecursionError):
            continue  # the compiler reports the error
        if isinstance(schema, dict):
            parts += [grammar[copied:at], json.dumps(enforceable_schema(schema))]
            copied = end
        at = end
    return "".join([*parts, grammar[copied:]])


def resolve(schema: object, reference: object) -> object:
    """Return the target of a reference (`#` and a JSON pointer) within a schema, or None if it does not exist."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    found = schema
    for segment in unquote(reference).split("/")[1:]:
        name = segment.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def escaped(name: str) -> str:
    """Return a name escaped for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _schemas_within(root: dict[str, Any], node: dict[str, Any], pointer: str) -> Iterator[tuple[Any, str]]:
    """Yield the schemas inside a schema and the schema that its `$ref` refers to, each with its JSON pointer."""
    for keyword, value in node.items():
        place = f"{pointer}/{escaped(keyword)}"
        if keyword in MAPS_OF_SCHEMAS and isinstance(value, dict):
            yield from ((item, f"{place}/{escaped(name)}") for name, item in value.items())
        elif isinstance(value, list) and (keyword in LISTS_OF_SCHEMAS or keyword == "items"):
            yield from ((item, f"{place}/{index}") for index, item in enumerate(value))
        elif keyword in SCHEMAS:
            yield value, place
        elif keyword == "$ref" and isinstance(value, str):
            yield resolve(root, value), unquote(value[1:])


def _names_could_repeat(node: dict[str, Any]) -> bool:
    """True if a key that the schema does not name could be one of its names, spelled with other JSON escapes."""
    has_names = bool(node.get("properties") or node.get("required"))
    has_patterns = bool(node.get("patternProperties"))
    return (has_names or has_patterns) and (has_patterns or node.get("additionalProperties") is not False)


def _mend_format(node: dict[str, Any]) -> None:
    """Replace date and time formats with patterns, and limit the length of host names.

    llguidance's own formats are less strict.
    """
    name = node.get("format")
    if name == "hostname":
        longest = node.get("maxLength", _MAX_HOST_NAME)
        node["maxLength"] = min(longest, _MAX_HOST_NAME) if isinstance(longest, int) else longest
    elif isinstance(name, str) and name in _FORMATS:
        del node["format"]
        if "pattern" in node:
            parts = node.get("allOf", [])
            node["allOf"] = [*parts, {"pattern": _FORMATS[name]}] if isinstance(parts, list) else parts
        else:
            node["pattern"] = _FORMATS[name]


def _mend_patterns(node: dict[str, Any], pointer: str, *, is_lenient: bool) -> None:
    def translated(pattern: str, place: str) -> str | None:
        try:
            return translate_pattern(pattern)
        except PatternError as error:
            if is_lenient:
                return None
            raise UnenforceableError(f"{pointer}{place}", f"cannot be enforced: {error}") from None

    if isinstance(pattern := node.get("pattern"), str):
        node["pattern"] = translated(pattern, "/pattern")
        if node["pattern"] is None:
            del node["pattern"]
    if isinstance(schemas := node.get("patternProperties"), dict):
        found: dict[str, Any] = {}
        for name, schema in schemas.items():
            if (text := translated(name, f"/patternProperties/{escaped(name)}")) is not None:
                # Two spellings of one pattern, such as `a` and `\\x61`.
                found[text] = {"allOf": [found[text], schema]} if text in found else schema
        node["patternProperties"] = found
    reference = node.get("$ref")
    if isinstance(reference, str) and "/patternProperties/" in reference and not is_lenient:
        raise UnenforceableError(f"{pointer}/$ref", "refers into patternProperties; put that schema into $defs")


def _mend_least_properties(node: dict[str, Any], pointer: str, *, is_lenient: bool) -> None:
    """Reject a minimum number of properties that an object could seem to reach by repeating keys."""
    least, required = node.get("minProperties"), node.get("required", ())
    if not isinstance(least, int) or not isinstance(required, (list, tuple)):
        return
    enforceable = len({name for name in required if isinstance(name, str)}) + 1
    is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if least <= enforceable or is_closed:
        return
    if not is_lenient:
        problem = (
            f"is {least}; keys that the schema does not name may repeat, so at most {enforceable} can be enforced: "
            "name more of them under required, or set additionalProperties to false"
        )
        raise UnenforceableError(f"{pointer}/minProperties", problem)
    node["minProperties"] = enforceable
