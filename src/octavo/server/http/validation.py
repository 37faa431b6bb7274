"""Turns pydantic's validation errors into errors of the HTTP interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import UsageError
from octavo.server.errors import ApiError, bad_request
from octavo.server.http.json_body import Path, format_path, quote

# pydantic's kind of error -> our code and what a value must be; the texts use pydantic's context.
_KINDS: dict[str, tuple[str, str]] = {
    "missing": ("missing_required_parameter", "is required"),
    "extra_forbidden": ("unsupported_parameter", "is not a parameter of this request; leave it out"),
    "not_finite": ("invalid_value", "is a number that is too large"),
    "finite_number": ("invalid_value", "must be a finite number"),
    "literal_error": ("invalid_value", "must be {expected}"),
    "enum": ("invalid_value", "must be {expected}"),
    "union_tag_invalid": ("invalid_value", "must be one of {expected_tags}, by its {discriminator}"),
    "union_tag_not_found": ("missing_required_parameter", "lacks {discriminator}"),
    "string_pattern_mismatch": ("invalid_value", "must match {pattern}"),
    "string_too_long": ("string_above_max_length", "may have at most {max_length} characters"),
    "string_too_short": ("invalid_value", "must have at least {min_length} characters"),
    "greater_than_equal": ("{kind}_below_min_value", "must be at least {ge}"),
    "greater_than": ("{kind}_below_min_value", "must be above {gt}"),
    "less_than_equal": ("{kind}_above_max_value", "may be at most {le}"),
    "less_than": ("{kind}_above_max_value", "must be below {lt}"),
    "int_type": ("invalid_type", "must be an integer"),
    "int_from_float": ("invalid_type", "must be an integer"),
    "float_type": ("invalid_type", "must be a number"),
    "bool_type": ("invalid_type", "must be true or false"),
    "string_type": ("invalid_type", "must be a string"),
    "list_type": ("invalid_type", "must be an array"),
    "tuple_type": ("invalid_type", "must be an array"),
    "dict_type": ("invalid_type", "must be an object"),
    "model_type": ("invalid_type", "must be an object"),
    "model_attributes_type": ("invalid_type", "must be an object"),
    "none_required": ("invalid_type", "must be null"),
}


_WITHOUT_VALUE = frozenset(
    {"missing_required_parameter", "unsupported_parameter", "array_above_max_length", "empty_array"}
)


def to_bad_request(errors: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """A 400 for the first of pydantic's errors; for a union, the error of the member that is closest to the value."""
    found = [(_path(error, body), error) for error in errors]
    path, error, rivals = _choose(found)
    if isinstance(cause := error.get("ctx", {}).get("error"), UsageError):
        return bad_request(str(cause), cause.param or format_path(path) or None, cause.code or "invalid_value")
    name = format_path(path)
    if rivals:
        wanted = " or ".join(dict.fromkeys(_words(rival).removeprefix("must be ") for rival in rivals))
        return bad_request(f"{name} must be {wanted}, not {quote(_value(path, body))}", name, "invalid_type")
    code, words = _code(error), _words(error)
    if not name:
        return bad_request(f"the body {words}", code=code)
    shown = "" if code in _WITHOUT_VALUE else f", not {quote(error['input'])}"
    return bad_request(f"{name} {words}{shown}", name, code)


def _choose(
    found: list[tuple[Path, Mapping[str, Any]]],
) -> tuple[Path, Mapping[str, Any], list[Mapping[str, Any]]]:
    """(path, error, all errors that together name the types allowed at the path)."""
    path, error = found[0]
    group = [(p, e) for p, e in found if p[:1] == path[:1]]
    if len(group) == 1 or not _is_type_error(error):
        return path, error, []
    judged = [(p, e) for p, e in group if not _is_type_error(e)]
    if judged:
        path, error = max(judged, key=lambda item: len(item[0]))
        return path, error, []
    shortest = min((p for p, _ in group), key=len)
    deeper = [(p, e) for p, e in group if p != shortest]
    if len({p for p, _ in deeper}) == 1:  # one member accepts the value's type, but not its content
        return *deeper[0], [e for _, e in deeper] if len(deeper) > 1 else []
    alike = [e for p, e in group if p == shortest]
    if deeper and len(alike) < len(group):
        alike = [*alike, {"type": "list_type"}]
    return shortest, alike[0], alike


def _path(error: Mapping[str, Any], body: object) -> Path:
    """The path in the body, without pydantic's names of union members and validators."""
    parts: list[str | int] = []
    location = error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"]
    value: Any = body
    for i, part in enumerate(location):
        is_name = isinstance(value, dict) and part in value
        # A type may be called as one of its fields is: `text` of a part of type text. Nothing can be within a scalar.
        is_tag = is_name and part == value.get("type") and not isinstance(value[part], (dict, list))
        if is_tag and i < len(location) - 1:
            continue
        if is_name or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
        elif error["type"] != "missing" or i < len(location) - 1:
            continue
        parts.append(part)
    return tuple(parts)


def _value(path: Path, body: Any) -> object:
    for part in path:
        body = body[part]
    return body


def _is_type_error(error: Mapping[str, Any]) -> bool:
    return _code(error) == "invalid_type"


def _code(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind == "too_long":
        return "array_above_max_length"
    if kind == "too_short":
        return "empty_array" if error["ctx"]["actual_length"] == 0 else "invalid_value"
    if kind in ("literal_error", "enum") and not isinstance(error["input"], str):
        return "invalid_type"
    if kind in _KINDS:
        is_decimal = any(isinstance(bound, float) for bound in (error["input"], *error.get("ctx", {}).values()))
        return _KINDS[kind][0].format(kind="decimal" if is_decimal else "integer")
    return "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"


def _words(error: Mapping[str, Any]) -> str:
    context = error.get("ctx", {})
    kind = error["type"]
    if kind == "too_long":
        return f"has {context['actual_length']} items; at most {context['max_length']} are allowed"
    if kind == "too_short":
        return f"must have at least {context['min_length']} items"
    if kind in _KINDS:
        return _KINDS[kind][1].format(**context)
    return f"is wrong: {error['msg']}"
