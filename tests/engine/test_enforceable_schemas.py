"""Schemas and patterns that the grammar library would take and then break."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from octavo.engine.texts.constrained import GrammarCompiler, GrammarState
from octavo.engine.texts.patterns import PatternError, UnenforceablePatternError, check_pattern, translate_pattern
from octavo.engine.texts.schemas import OPTIONS, UnenforceableError, enforceable_lark, enforceable_schema
from octavo.errors import UsageError
from octavo.sampling_params import StructuredOutputsParams
from tests.support.byte_tokenizer import ByteTokenizer

COMPILER = GrammarCompiler(ByteTokenizer(), 263)


def accepts(text: str, **constraint: Any) -> bool:
    return is_whole(COMPILER.compile(StructuredOutputsParams(**constraint)), text)


def is_whole(state: GrammarState, text: str) -> bool:
    matcher, token_ids = state.copy().matcher, [2 + byte for byte in text.encode()]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ('^[^"]+$', "ab'\\", 'a"'),
        (r"^[^\\]$", '"', "\\"),
        ('^[^<>"]*$', "a\\", '"'),
        (r"^[^\x22]$", "\\", '"'),
        (r'^[^"\n]{2,3}$', "é\\", 'a"'),
        (r"^[\x00-\x1f]$", "\n", '"'),
        (r"^[\s\S]$", '"', '""'),
        ("^.$", '"', "\u2028"),
        (r"^\s$", "\ufeff", "a"),
        (r"^\w+$", "a_0", "é"),
        ("^[^]$", "\\", ""),
        (r"^\p{L}\P{L}$", 'é"', '"é'),
        ("^a|b$", 'xb', "xa"),
        ("(^a|b)(c|d$)", "zbcz", "zacz"),
        (r"^[\u{1f600}-\u{1f64f}]$", "😀", "a"),
        (r"^\ud83d\ude00$", "😀", "\ufffd"),
        (r"^[&&a[-]$", "&", "d"),
        ("(?i)^a$", "A", "b"),
        ("^(?s:.)$", "\n", ""),
        ("^[[:alpha:]]$", "a", ":"),
        (r"\Aa\z", "a", "ab"),
        ("^{a}]$", "{a}]", "a"),
    ],
)  # fmt: skip
def test_patterns_mean_what_they_say(pattern: str, right: str, wrong: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert accepts(json.dumps(right, ensure_ascii=False), json=schema)
    assert not accepts(json.dumps(wrong, ensure_ascii=False), json=schema)
    lark = f"start: %json {json.dumps(schema)}"
    assert accepts(json.dumps(right, ensure_ascii=False), grammar=lark)
    assert not accepts(json.dumps(wrong, ensure_ascii=False), grammar=lark)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (r"a\b", "a word boundary cannot be enforced"),
        (r"(a)\1", "a backreference cannot be enforced"),
        (r"(?<n>a)\k<n>", "a backreference cannot be enforced"),
        ("(?=a)b", "look-around cannot be enforced"),
        ("(?<!a+)b", "look-around cannot be enforced"),
        ("a^b", "anchors belong at the beginning and the end"),
        ("(^a)*b", "anchors belong at the beginning and the end"),
    ],
)
def test_what_no_automaton_can_match_is_refused(pattern: str, problem: str) -> None:
    check_pattern(pattern)
    with pytest.raises(UnenforceablePatternError, match=re.escape(problem)):
        translate_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a{,3}", "means different things"),
        (r"\e", r"unrecognized escape sequence \e"),
        ("[]]", "unmatched ]"),
        ("(?m)^a$", "the flag m is not supported"),
        (r"\k", "needs the name of a group"),
        (r"[\ud800-\udbff]", "U+D800 is not a character"),
        (r"\u{110000}", "U+110000 is not a character"),
        ("a{1234567890}", "the number of repetitions in {1234567890} is too large"),
    ],
)
def test_what_has_several_readings_is_refused(pattern: str, problem: str) -> None:
    check_pattern(pattern)
    with pytest.raises(PatternError, match=re.escape(problem)):
        translate_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["(", ")", "[a", "a**", "*a", "^*", "[z-a]", "a{3,2}", "\\", "(?<a", "(?>a)", "(" * 101]
)
def test_wrong_syntax_is_refused(pattern: str) -> None:
    for read in (check_pattern, translate_pattern):
        with pytest.raises(PatternError):
            read(pattern)


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "b\n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (OPEN, '{"a":1,"c":"x"}', r'{"\u0061":"x"}'),
        (OPEN, r'{"b\n":1}', r'{"b\u000a":"x"}'),
        ({"patternProperties": {"^x": {"type": "integer"}}, "type": "object"}, '{"x":1}', r'{"\u0078":"x"}'),
        ({"patternProperties": {"x": {"type": "integer"}, "\\x78": {"minimum": 3}}}, '{"x":3}', '{"x":2}'),
        ({"patternProperties": {"x": {"type": "integer"}, "\\x78": {"minimum": 3}}}, '{"x":3}', '{"x":"a"}'),
        ({"minProperties": 2, "required": ["a"], "type": "object"}, '{"a":1,"b":2}', '{"a":1}'),
        ({"format": "date", "type": "string"}, '"2024-02-29"', '"2023-02-29"'),
        ({"format": "date", "type": "string"}, '"2000-02-29"', '"1900-02-29"'),
        ({"format": "date", "type": "string", "pattern": "^2"}, '"2000-02-29"', '"1999-01-01"'),
        ({"format": "date"}, "3", '"2023-04-31"'),
        ({"format": "date-time", "type": "string"}, '"2024-02-29T23:59:59.5Z"', '"2023-02-29T23:59:59Z"'),
        ({"format": "date-time", "type": "string"}, '"2024-02-28t00:00:00+01:30"', '"2024-02-28T23:59:60Z"'),
        ({"format": "time", "type": "string"}, '"23:59:59z"', '"12:00:60Z"'),
        ({"format": "hostname", "type": "string"}, '"a.b-c"', f'"{"a." * 127}a"'),
        ({"$defs": {"d": {"format": "date"}}, "$ref": "#/$defs/d", "type": "string"}, '"2024-02-29"', '"2023-02-29"'),
        ({"x-own": {"d": {"pattern": '^[^"]$'}}, "$ref": "#/x-own/d", "type": "string"}, '"a"', '"\\""'),
        ({"properties": {"pattern": {"const": "("}}, "type": "object"}, '{"pattern":"("}', '{"pattern":")"}'),
    ],
)
def test_schemas_mean_what_they_say(schema: dict[str, Any], right: str, wrong: str) -> None:
    assert accepts(right, json=schema)
    assert not accepts(wrong, json=schema)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"minProperties": 2, "type": "object"}, "/minProperties is 2; keys that the schema does not name may repeat"),
        ({"items": {"pattern": r"\b"}}, "/items/pattern cannot be enforced: a word boundary"),
        ({"patternProperties": {"/(?=a)": {}}}, "/patternProperties/~1(?=a) cannot be enforced: look-around"),
        ({"properties": {"a": {"const": "\x1b"}}, "type": "object"}, "/properties/a/const has control characters"),
        ({"$ref": "#/patternProperties/a", "patternProperties": {"a": {}}}, "/$ref refers into patternProperties"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_place(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        COMPILER.compile(StructuredOutputsParams(json=schema))
    with pytest.raises(UsageError, match=re.escape(problem)):
        COMPILER.compile(StructuredOutputsParams(grammar=f"start: %json {json.dumps(schema)}"))
    lenient = enforceable_schema({**schema, OPTIONS: {"lenient": True}})
    assert "(?=" not in json.dumps(lenient)
    assert lenient.get("minProperties", 0) < 2


def test_the_schema_stays_as_it_was() -> None:
    schema = {"type": "string", "pattern": "^.$", "format": "date"}
    enforceable_schema(schema)
    assert schema == {"type": "string", "pattern": "^.$", "format": "date"}


def test_only_schemas_in_a_lark_grammar_are_rewritten() -> None:
    lark = 'start: "%json {" /%json {"pattern": "."}/ a // %json {"pattern": "."}\n# %json {"pattern": "."}\na: %json '
    found = enforceable_lark(lark + '{"pattern": "."} b\nb: %json{"type": "null"} | %json {')
    assert found.startswith(lark + '{"pattern": "^(?:')
    assert found.endswith(' b\nb: %json{"type": "null"} | %json {')
    with pytest.raises(UnenforceableError):
        enforceable_lark('start: %json {"pattern": "(?=a)"}')


def person(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], **more}


BASE = {"$defs": {"base": person()}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (person(), '{"name":"a"}', '{"name":"a","b":1}'),
        (person(additionalProperties=True), '{"name":"a","b":1}', "{}"),
        (person(patternProperties={"^x": {}}), '{"name":"a","b":1}', "{}"),
        ({"type": "array", "items": person()}, '[{"name":"a"}]', '[{"name":"a","b":1}]'),
        ({**BASE, "$ref": "#/$defs/base"}, '{"name":"a"}', '{"name":"a","b":1}'),
        ({**BASE, "anyOf": [{"$ref": "#/$defs/base"}, {"type": "null"}]}, "null", '{"name":"a","b":1}'),
        (
            {**BASE, "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "integer"}}}]},
            '{"name":"a","b":1}',
            '{"name":"a","c":1}',
        ),
        (
            {**BASE, "type": "object", "properties": {"b": {"$ref": "#/$defs/base"}}, "allOf": [{"required": ["b"]}]},
            '{"b":{"name":"a"}}',
            '{"b":{"name":"a","c":1}}',
        ),
        (
            person(anyOf=[{"properties": {"b": {"type": "integer"}}}, {"required": ["name"]}]),
            '{"name":"a","b":1}',
            '{"name":"a","c":1}',
        ),
        ({"type": "object"}, '{"a":1}', "[]"),
        ({"type": "object", "properties": {"a": {"type": "object"}}}, '{"a":{"b":1}}', '{"a":{},"b":1}'),
    ],
)
def test_objects_that_say_nothing_about_other_properties_are_closed(
    schema: dict[str, Any], right: str, wrong: str
) -> None:
    params = StructuredOutputsParams(json=schema)
    state = COMPILER.compile(params, closed_objects=True)
    assert is_whole(state, right)
    assert not is_whole(state, wrong)
    assert accepts(right, json=schema)
    if '"c"' in wrong or '"b":1' in wrong:
        assert accepts(wrong, json=schema)  # the choice makes the difference


def test_a_schema_that_others_build_on_is_not_closed_by_itself() -> None:
    schema = {
        "$defs": {"base": person()},
        "type": "object",
        "properties": {
            "plain": {"$ref": "#/$defs/base"},
            "more": {
                "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]
            },
        },
        "required": ["more"],
    }
    state = COMPILER.compile(StructuredOutputsParams(json=schema), closed_objects=True)
    assert is_whole(state, '{"more":{"name":"a","b":1}}')
    assert not is_whole(state, '{"more":{"name":"a","b":1,"c":2}}')
