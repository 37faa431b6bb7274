"""Strict parsing of JSON request bodies, and the field types of request models.

RFC 8259 leaves some cases to the reader. All of them are refused here: repeated names, NaN and Infinity, numbers beyond
float64, half surrogate pairs, deep nesting.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any, TypeAlias

from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.errors import bad_request

MAX_DEPTH = 128
# The fields with a caller's JSON schemas. Nesting that is too deep there is an error of the schema.
_SCHEMA_FIELDS = frozenset({"response_format", "tools", "structured_outputs", "guided_json", "text"})

_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:]', re.DOTALL)

Path: TypeAlias = "tuple[str | int, ...]"


def _whole_number(value: object) -> object:
    """Converts 1.0 to 1: JSON has one type of numbers, and JSON Schema calls 1.0 an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _finite_number(value: object) -> object:
    """Raises pydantic's error for an integer beyond float64."""
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            raise PydanticCustomError("not_finite", "the number is too large") from None
    return value


# Limits of a number belong before its conversion: `Annotated[int, Field(ge=0), WHOLE]`.
WHOLE = BeforeValidator(_whole_number)
FINITE = BeforeValidator(_finite_number)
Int = Annotated[int, WHOLE]
Number = Annotated[float, FINITE]
Text: TypeAlias = str  # the whole body has been checked for half surrogate pairs


class RequestModel(BaseModel):
    """The body of a request. No type is converted into another one, and no field is ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class JsonRoute(APIRoute):
    """A route whose body is one JSON object, read by `parse_object`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            strict = _ParsedRequest(request.scope, request.receive)
            strict.parsed = parse_object(request.state.body)
            return await handler(strict)

        return handle


class _ParsedRequest(Request):
    """A request whose body is parsed already, because FastAPI hides the errors of its own parsing."""

    parsed: dict[str, Any]

    async def json(self) -> Any:
        return self.parsed

    async def body(self) -> bytes:
        return b"parsed"


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError 400 that says what is wrong, and where."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
        raise bad_request(message, code="invalid_encoding") from None
    value, is_finite = _parse(text)
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {_json_type(value)}", code="invalid_type")
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(text)
    if not is_finite or "\\ud" in text or "\\uD" in text:
        _check_leaves(value)
    return value


def _parse(text: str) -> tuple[Any, bool]:
    """The value, and False if a number in it is beyond float64 or has more digits than Python reads. It is inf then."""
    try:
        try:
            return _DECODER.decode(text), True
        except json.JSONDecodeError:
            raise
        except ValueError:
            return _LENIENT_DECODER.decode(text), False
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        problem = f"not valid JSON: {error.msg} at" if text.strip() else "empty:"
        raise bad_request(f"the body is {problem} {where}", code="invalid_json") from None
    except RecursionError:
        _check_depth(text)
        raise


def _finite_float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError("beyond float64")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name, count in counts.items() if count > 1)
        raise bad_request(f"the name {quote(repeated)} is in one object twice", code="invalid_json")
    return values


def _refuse_constant(name: str) -> float:
    raise bad_request(f"{name} is not a JSON value; leave the field out", code="invalid_json")


# Python itself raises ValueError for an integer with more digits than sys.get_int_max_str_digits().
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite_float)
_LENIENT_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=float)


def _check_depth(text: str) -> None:
    """Raises ApiError if the text is nested too deeply. Works without recursion, to need no deep stack."""
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


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every string, number and name in a value. The path of a name is that of its object."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield path, name
            yield from _leaves(item, (*path, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, i))
    else:
        yield path, value


def _check_leaves(value: dict[str, Any]) -> None:
    """Raises ApiError for a number beyond float64 and for half a surrogate pair."""
    for path, leaf in _leaves(value):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            name = format_path(path)
            raise bad_request(f"{name} is a number that is too large", name, "invalid_value")
        try:
            str(leaf).encode("utf-8")
        except UnicodeEncodeError as error:
            name = format_path(path)
            message = f"{name or 'a name'} holds half of a surrogate pair at character {error.start}"
            raise bad_request(message, name or None, "invalid_encoding") from None


def format_path(path: Path) -> str:
    """The path as in `messages[0].content`. Line ends and other characters that cannot be printed are escaped."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            printable = (char if char.isprintable() else ascii(char)[1:-1] for char in part[:200])
            text += ("." if text else "") + "".join(printable)
    return text[:200]


def quote(value: object, limit: int = 64) -> str:
    """A caller's value as one short line of ASCII. Of arrays and objects only the type is shown."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (list, dict)):
        return _json_type(value)
    text = ascii(value[: limit + 1]) if isinstance(value, str) else ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


_JSON_TYPES = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}


def _json_type(value: object) -> str:
    return "null" if value is None else _JSON_TYPES.get(type(value), "an object")
