"""Turns `StructuredOutputsParams` into the text of a grammar, with cheap checks that llguidance lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from llguidance import LLMatcher

from octavo.errors import UsageError
from octavo.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON with no more white space at a time than an indented document has; models that are given more run away in it.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}", "lenient": False}
_MAX_DEPTH = 96  # of a schema; llguidance refuses more than 128 itself
_MAX_NAMES = 2048  # properties of one object
_MAX_REPEAT = 10_000  # longer than any answer, and no automaton has as many states
_MAX_CHARS_SHOWN = 300
_REPETITION = re.compile(r"(?<!\\)\{(\d+)(?:,(\d*))?\}")
# The values of these keywords are data, not schemas.
_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
_LENGTHS = ("minLength", "minItems", "minProperties")


class GrammarSource(NamedTuple):
    """A grammar in llguidance's form. field: its field in `StructuredOutputsParams`."""

    field: str
    text: str

    def refusal(self, problem: str) -> UsageError:
        """The error about this grammar."""
        return _refusal(self.field, problem)


def make_source(params: StructuredOutputsParams) -> GrammarSource:
    """The source of a grammar. Raises UsageError for errors that can be found without compiling."""
    if params.json_object:
        return GrammarSource("json_object", _json_grammar({"type": "object"}))
    if params.json is not None:
        return GrammarSource("json", _json_grammar(_parse_schema(str(params.json))))
    if params.regex is not None:
        _check_regex(params.regex)
        return GrammarSource("regex", LLMatcher.grammar_from_regex(params.regex))
    if params.grammar is not None:
        return GrammarSource("grammar", LLMatcher.grammar_from_lark(params.grammar))
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice or ())
    return GrammarSource("choice", LLMatcher.grammar_from_lark(f"start: {choices}"))


def _refusal(field: str, problem: str) -> UsageError:
    code = "invalid_json_schema" if field == "json" else "invalid_grammar"
    shown = problem if len(problem) <= _MAX_CHARS_SHOWN else problem[:_MAX_CHARS_SHOWN] + "..."
    return UsageError(f"structured_outputs.{field} {shown}", param=f"structured_outputs.{field}", code=code)


def _json_grammar(schema: dict[str, Any]) -> str:
    text: str = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
    return text


def _parse_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal("json", f"is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refusal("json", f"must be an object or true, not {schema!r:.80}")
    if "x-guidance" in schema:
        raise _refusal("json", "has the keyword /x-guidance, which is not supported")
    _check_sizes(schema)
    return schema


def _check_sizes(schema: dict[str, Any]) -> None:
    """Refuses grammars that would compile but never be satisfied, or that take too long to compile."""
    level: list[Any] = [schema]
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        level = [child for value in level for child in _children(value)]
    raise _refusal("json", f"is nested deeper than {_MAX_DEPTH} levels")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return ()
    for key in _LENGTHS:
        length = value.get(key)
        if isinstance(length, (int, float)) and length > _MAX_REPEAT:
            raise _refusal("json", f"has {key} {length:g}; at most {_MAX_REPEAT} can be enforced")
    for key in ("properties", "required"):
        names = value.get(key)
        if isinstance(names, (dict, list)) and len(names) > _MAX_NAMES:
            raise _refusal("json", f"has {len(names)} {key} in one object; at most {_MAX_NAMES} can be enforced")
    return [child for key, child in value.items() if key not in _DATA_KEYWORDS]


def _check_regex(regex: str) -> None:
    for found in _REPETITION.finditer(regex):
        if any(len(number) > 9 or int(number) > _MAX_REPEAT for number in found.groups() if number):
            raise _refusal("regex", f"repeats {found[0]:.40} times; at most {_MAX_REPEAT} are allowed")
