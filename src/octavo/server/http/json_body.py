"""Strict JSON parsing, the field types of request models, and the errors about them.

RFC 8259 leaves the treatment of some texts to the parser. All such texts are refused here: repeated names, NaN and
Infinity, numbers beyond float64, half surrogate pairs, deep nesting.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from octavo.errors import UsageError
from octavo.server.errors import ApiError, bad_request

MAX_DEPTH = 128
# Fields that contain a caller's JSON schemas. Nesting that is too deep there is the schema's error.
_SCHEMA_FIELDS = frozenset({"response_format", "tools", "structured_outputs", "guided_json", "text"})

_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:]', re.DOTALL)

Path: TypeAlias = "tuple[str | int, ...]"


def _whole_number(value: object) -> object:
    """Convert 1.0 to 1: JSON has only one number type, and JSON Schema considers 1.0 an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _finite_number(value: object) -> object:
    """Raise pydantic's error for an integer beyond the range of float64."""
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            raise PydanticCustomError("not_finite", "the number is too large") from None
    return value


def _whole_numbers(values: object) -> object:
    """Convert the floats in a list like `_whole_number`. A list without floats is returned at once, to save time."""
    has_floats = isinstance(values, list) and float in set(map(type, values))
    return [*map(_whole_number, values)] if has_floats else values  # type: ignore[call-overload]


# Put a number's limits before its conversion: `Annotated[int, Field(ge=0), WHOLE]`.
WHOLE = BeforeValidator(_whole_number)
WHOLE_NUMBERS = BeforeValidator(_whole_numbers)  # for a list of `int`
FINITE = BeforeValidator(_finite_number)
Int = Annotated[int, WHOLE]
Number = Annotated[float, FINITE]
Text: TypeAlias = str  # the whole body has already been checked for half surrogate pairs


class RequestModel(BaseModel):
    """The base class of request bodies. Types are not converted, and unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse the JSON object in `body`. Raises ApiError 400 with the problem and its position."""
    return as_object(parse_value(body))


def parse_value(body: bytes) -> Any:
    """Parse the JSON value in `body`, of any type. Raises ApiError 400."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise wrong_encoding(error.object[error.start], error.start) from None
    value, is_finite = _parse(text)
    if text.count("[") + text.count("{") > MAX_DEPTH:
        check_depth(text)
    if not is_finite or "\\ud" in text or "\\uD" in text:
        check_leaves(value)
    return value


def as_object(value: Any) -> dict[str, Any]:
    """Return the body if it is an object. Raises ApiError if not."""
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {_json_type(value)}", code="invalid_type")
    return value


def wrong_encoding(byte: int, place: int) -> ApiError:
    """Return the error about a byte that is not UTF-8."""
    return bad_request(f"the body is not UTF-8: byte {byte:#04x} at offset {place}", code="invalid_encoding")


def _parse(text: str) -> tuple[Any, bool]:
    """Return the result of `decode_json`. Raises ApiError for malformed text."""
    try:
        return decode_json(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        problem = f"not valid JSON: {error.msg} at" if text.strip() else "empty:"
        raise bad_request(f"the body is {problem} {where}", code="invalid_json") from None
    except RecursionError:
        check_depth(text)
        raise


def decode_json(text: str) -> tuple[Any, bool]:
    """Return the value, and whether it contains only numbers that fit into float64 and do not have too many digits for
    Python. Any other number becomes inf.

    Raises JSONDecodeError, and ApiError for text that JSON allows but a body may not contain.
    """
    try:
        return _DECODER.decode(text), True
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _LENIENT_DECODER.decode(text), False


def _finite_float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError("beyond float64")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise repeated_name(next(name for name, count in counts.items() if count > 1))
    return values


def repeated_name(name: str) -> ApiError:
    """Return the error about a name that occurs twice in an object."""
    return bad_request(f"the name {quote(name)} appears twice in one object", code="invalid_json")


def _refuse_constant(name: str) -> float:
    raise bad_request(f"{name} is not a JSON value; leave the field out", code="invalid_json")


# Python raises ValueError for an integer with more digits than sys.get_int_max_str_digits().
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite_float)
_LENIENT_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=float)


def check_depth(text: str) -> None:
    """Raise ApiError if the text is nested too deeply. The check is not recursive, so it needs no deep stack."""
    depth, field, last_string = 0, "", ""
    for token in _STRUCTURE.finditer(text):
        char = token[0][0]
        if char == '"':
            last_string = token[0][1:-1]
        elif char == ":":
            field = last_string if depth == 1 else field
        else:
            depth += 1 if char in "[{" else -1
            if depth > MAX_DEPTH:
                message = f"the body is nested deeper than {MAX_DEPTH} levels"
                if field in _SCHEMA_FIELDS:
                    raise bad_request(f"{message}, in {field}", field, "invalid_json_schema")
                raise bad_request(message, code="invalid_json")


def check_leaves(value: Any, path: Path = ()) -> None:
    """Raise ApiError for a number beyond float64 and for half a surrogate pair. If a name contains half a pair, the
    error gives the path of the object that has this name.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            check_leaves(name, path)
            check_leaves(item, (*path, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_leaves(item, (*path, i))
    elif isinstance(value, float) and math.isinf(value):
        name = format_path(path)
        raise bad_request(f"{name} is a number that is too large", name, "invalid_value")
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            name = format_path(path)
            message = f"{name or 'a name'} contains half of a surrogate pair at character {error.start}"
            raise bad_request(message, name or None, "invalid_encoding") from None


def format_path(path: Path) -> str:
    """Format the path as in `messages[0].content`. Line ends and other unprintable characters are escaped."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            printable = (char if char.isprintable() else ascii(char)[1:-1] for char in part[:200])
            text += ("." if text else "") + "".join(printable)
    return text[:200]


def quote(value: object, limit: int = 64) -> str:
    """Return a caller's value as one short line of ASCII. For arrays and objects, only the type is shown."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (list, dict)):
        return _json_type(value)
    text = ascii(value[: limit + 1]) if isinstance(value, str) else ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


_JSON_TYPES = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}


def _json_type(value: object) -> str:
    return "null" if value is None else _JSON_TYPES.get(type(value), "an object")


# pydantic's kind of error -> our code and a description of valid values, which uses pydantic's context.
_KINDS: dict[str, tuple[str, str]] = {
    "missing": ("missing_required_parameter", "is required"),
    "extra_forbidden": ("unsupported_parameter", "is not a parameter of this request; leave it out"),
    "not_finite": ("invalid_value", "is a number that is too large"),
    "finite_number": ("invalid_value", "must be a finite number"),
    "literal_error": ("invalid_value", "must be {expected}"),
    "enum": ("invalid_value", "must be {expected}"),
    "union_tag_invalid": ("invalid_value", "must have {discriminator} set to one of {expected_tags}"),
    "union_tag_not_found": ("missing_required_parameter", "lacks {discriminator}"),
    "string_pattern_mismatch": ("invalid_value", "must match {pattern}"),
    "string_too_long": ("string_above_max_length", "may have at most {max_length} characters"),
    "string_too_short": ("invalid_value", "must have at least {min_length} characters"),
    "too_long": ("array_above_max_length", "has {actual_length} items; at most {max_length} are allowed"),
    "too_short": ("invalid_value", "must have at least {min_length} items"),
    "greater_than_equal": ("{kind}_below_min_value", "must be at least {ge}"),
    "greater_than": ("{kind}_below_min_value", "must be above {gt}"),
    "less_than_equal": ("{kind}_above_max_value", "may be at most {le}"),
    "less_than": ("{kind}_above_max_value", "must be below {lt}"),
    "int_type": ("invalid_type", "must be an integer"),
    "int_parsing": ("invalid_type", "must be an integer"),
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
_WITHOUT_VALUE = ("missing_required_parameter", "unsupported_parameter", "array_above_max_length", "empty_array")


def to_bad_request(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Convert the first of pydantic's errors to an ApiError 400. For a union, use the error of the member that the
    value is closest to.
    """
    found = [(_path(error, body), error) for error in errors]
    path, error, rivals = _choose(found)
    if isinstance(cause := error.get("ctx", {}).get("error"), UsageError):
        return bad_request(str(cause), cause.param or format_path(path) or None, cause.code or "invalid_value")
    name = format_path(path)
    if rivals:
        wanted = " or ".join(dict.fromkeys(_judge(rival)[1].removeprefix("must be ") for rival in rivals))
        value = reduce(lambda value, part: value[part], path, body)
        return bad_request(f"{name} must be {wanted}, not {quote(value)}", name, "invalid_type")
    code, words = _judge(error)
    if not name:
        return bad_request(f"the body {words}", code=code)
    shown = "" if code in _WITHOUT_VALUE else f", not {quote(error['input'])}"
    return bad_request(f"{name} {words}{shown}", name, code)


def _choose(
    found: list[tuple[Path, Mapping[str, Any]]],
) -> tuple[Path, Mapping[str, Any], list[Mapping[str, Any]]]:
    """Return the path of the error to report, the error, and all errors that together name the types allowed at this
    path.

    The last list is empty if there is only one such error.
    """
    path, error = found[0]
    group = [(p, e) for p, e in found if p[:1] == path[:1]]
    if len(group) == 1 or _judge(error)[0] != "invalid_type":
        return path, error, []
    judged = [(p, e) for p, e in group if _judge(e)[0] != "invalid_type"]
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
    """Return the path of an error in the body, without pydantic's names of union members and validators. For an error
    in the query, return the parameter's name.
    """
    if error["loc"][:1] == ("query",):
        return tuple(error["loc"][1:])
    parts: list[str | int] = []
    location = error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"]
    value: Any = body
    for i, part in enumerate(location):
        is_name = isinstance(value, dict) and part in value
        # A type may have the same name as a field, such as `text` in a part of type text. Scalars contain nothing.
        is_tag = is_name and part == value.get("type") and not isinstance(value[part], (dict, list))
        if is_tag and i < len(location) - 1:
            continue
        if is_name or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
        elif error["type"] != "missing" or i < len(location) - 1:
            continue
        parts.append(part)
    return tuple(parts)


def _judge(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return (code, words) for one of pydantic's errors."""
    kind, value, context = error["type"], error.get("input"), error.get("ctx", {})
    other = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
    code, words = _KINDS.get(kind, (other, "is invalid: {msg}"))
    if kind == "too_short" and context["actual_length"] == 0:
        code = "empty_array"
    elif kind in ("literal_error", "enum") and not isinstance(value, str):
        code = "invalid_type"
    if context.get("expected") in ("True", "False"):  # JSON spells them differently
        context = {**context, "expected": context["expected"].lower()}
    is_decimal = any(isinstance(bound, float) for bound in (value, *context.values()))
    return code.format(kind="decimal" if is_decimal else "integer"), words.format(**context, msg=error.get("msg"))
