"""Schemas and tools of requests: what is refused, with which words, and how fast."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from octavo.errors import UsageError
from octavo.server.config import ServerConfig
from octavo.server.generation.json_schema import (
    FORMATS,
    BlocksLoopError,
    check_schema,
    check_tool_choice,
    check_tools,
)
from octavo.server.generation.spec import NamedTool
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.asgi_server import asgi_client
from tests.support.describing_schemas import DESCRIBING
from tests.support.fake_client import FakeClient, Script, fake_model
from tests.support.realistic_tools import realistic_tools
from tests.support.tool_outputs import tool


def refusal(schema: object, *, is_enforced: bool = True) -> str:
    with pytest.raises(UsageError) as caught:
        check_schema(schema, "response_format", is_enforced=is_enforced)
    assert caught.value.param == "response_format"
    assert caught.value.code == "invalid_json_schema"
    message = str(caught.value)
    assert message.startswith("response_format is not a usable JSON schema: ")
    assert len(message) < 700
    return message.removeprefix("response_format is not a usable JSON schema: ")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": ["string", "null"], "minLength": 1, "maxLength": 2**31 - 1, "pattern": "^[a-z]+$"},
        {"type": "integer", "minimum": 0, "exclusiveMaximum": 10.5, "multipleOf": 2},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False, "minItems": 1, "maxItems": 10**9},
        {"type": "object", "properties": {"a": {}}, "required": ["a", "b"], "additionalProperties": {"type": "null"}},
        {"type": "object", "patternProperties": {"^x": {"type": "string"}}, "minProperties": 1, "maxProperties": 4},
        {"enum": [1, "a", None, [1], {"b": 2.5}]},
        {"const": {"a": [True]}},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"allOf": [{"properties": {"a": {"type": "string"}}}, {"required": ["a"]}], "type": "object"},
        {"$defs": {"a/b~": {"type": "string"}}, "$ref": "#/$defs/a~1b~0"},
        {"definitions": {"a b": {"type": "string"}}, "items": {"$ref": "#/definitions/a%20b"}, "type": "array"},
        {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["next"]},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}, "required": ["a"]},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://x/y", "const": 3},
        {"title": "t", "description": "d", "default": 1, "examples": [{}], "deprecated": True, "$comment": "c"},
        {"readOnly": True, "writeOnly": False, "x-order": 3, "contentEncoding": "base64", "type": "string"},
        {"properties": {"not": {"type": "string"}, "$ref": {"type": "string"}, "type": {"enum": ["a"]}}},
        {"enum": [{"not": 1, "$ref": "nowhere"}]},
        {"type": "integer", "format": "int64"},
        *({"type": "string", "format": name} for name in FORMATS),
    ],
)
def test_accepted(schema: object) -> None:
    check_schema(schema, "response_format")
    check_schema(schema, "response_format", is_enforced=False)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "banana"}, '/type is "banana"; types are'),
        ({"type": "string", "pattern": "("}, '/pattern is "(" and cannot be used: unclosed group'),
        ({"$ref": "#/$defs/a"}, '/$ref is "#/$defs/a", which does not exist'),
        ({"$ref": "https://example.com/s.json"}, "only references within the schema"),
        ({"$ref": "other.json#/a"}, "only references within the schema"),
        ({"$ref": "#anchor", "$anchor": "anchor"}, "only references within the schema"),
        ({"$ref": "#"}, "refers to itself without end"),
        (
            {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "type": "array",
                "items": {"$ref": "#/$defs/a"},
            },
            " refers to itself without end",
        ),
        ({"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#"}]}]}, "refers to itself without end"),
        (
            {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
            "needs another value inside each value",
        ),
        (
            {
                "$defs": {"a": {"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
                "$ref": "#/$defs/a",
            },
            "needs another value inside each value",
        ),
        (nested(5000), "is nested deeper than 96 levels"),
        ({"description": "x" * 10**6}, "the limit is 524,288"),
        ({"minLength": 10**9}, "/minLength is 1000000000; expected `int` <= 10000"),
        ({"type": "array", "minItems": 10**9}, "/minItems is 1000000000; expected `int` <= 10000"),
        ({"maxLength": 2**40}, "/maxLength is 1099511627776; expected `int` <= 2147483647"),
        ({"maxItems": 10**400}, "/maxItems is an integer of more than 20 digits"),
        ({"properties": {str(index): {} for index in range(3000)}}, '/properties is {"0": {}, "1": {}'),
        ({"type": "string", "pattern": "a" * 10_000}, "/pattern has 10,000 characters"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        (False, "Unsatisfiable"),
        ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "Unsatisfiable"),
        # keywords that cannot be enforced, and typing mistakes
        ({"items": [{}, {"uniqueItems": True}]}, "/items/1/uniqueItems is not supported"),
        ({"properties": {"a/b": {"not": {}}}}, "/properties/a~1b/not is not supported: list what is allowed"),
        ({"anyOf": [{"if": {}, "then": {}}]}, "/anyOf/0/if is not supported: use anyOf"),
        ({"contains": {}}, "/contains is not supported"),
        ({"dependentRequired": {}}, "/dependentRequired is not supported"),
        ({"propertyNames": {}}, "/propertyNames is not supported"),
        ({"unevaluatedProperties": False}, "/unevaluatedProperties is not supported"),
        ({"$dynamicRef": "#a"}, "/$dynamicRef is not supported: use $ref"),
        ({"type": "string", "nullable": True}, '/nullable is not supported: write "type": [..., "null"]'),
        ({"minLenght": 3}, "/minLenght is not a keyword that can be enforced"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance is not supported in requests"),
        (
            {"$schema": "http://json-schema.org/draft-04/schema#"},
            "the supported drafts of JSON Schema are 6, 7, 2019-09 and 2020-12",
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]},
            "/prefixItems belongs to draft 2020-12",
        ),
        ({"properties": {"a": {"$id": "http://x/"}}}, "/properties/a/$id within a schema"),
        ({"type": "string", "format": "iri"}, '/format is "iri"; the supported formats are date-time'),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": r"a\b"}, "a word boundary cannot be enforced"),
        ({"type": "string", "pattern": r"(a)\1"}, "a backreference cannot be enforced"),
        ({"type": "string", "pattern": "a$b"}, "anchors belong at the beginning and the end"),
        ({"type": "string", "pattern": "a{,3}"}, "{,n} means different things in different languages; write {0,n}"),
        ({"type": "object", "minProperties": 2}, "/minProperties is 2; keys that the schema does not name may repeat"),
        (
            {"items": {"properties": {"a": {}}, "required": ["a"], "minProperties": 3}, "type": "array"},
            "/items/minProperties is 3; keys that the schema does not name may repeat, so at most 2 can be enforced",
        ),
        (
            {"patternProperties": {"^x": {}}, "properties": {"a": {"$ref": "#/patternProperties/%5Ex"}}},
            "/properties/a/$ref refers into patternProperties; put that schema into $defs",
        ),
        ({"oneOf": [{"type": "string"}, {"minLength": 3, "type": "string"}]}, "oneOf whose members may overlap"),
        # malformed values
        (3, "must be an object or a boolean, not 3"),
        (None, "must be an object or a boolean, not null"),
        ({"items": 3}, "/items is 3; expected `bool | object | array`, got `int`"),
        ({"properties": []}, "/properties is []; expected `object`, got `array`"),
        ({"anyOf": []}, "/anyOf is []; expected `array` of length >= 1"),
        ({"anyOf": {}}, "/anyOf is {}; expected `array`, got `object`"),
        ({"enum": []}, "/enum is []; expected `array` of length >= 1"),
        ({"type": []}, "/type is []; expected `array` of length >= 1"),
        ({"type": [["string"]]}, '/type is ["string"]'),
        ({"required": "a"}, '/required is "a"; expected `array`, got `str`'),
        ({"minLength": -1}, "/minLength is -1; expected `int` >= 0"),
        ({"minLength": True}, "/minLength is true; expected `int`, got `bool`"),
        ({"minimum": "3"}, '/minimum is "3"; expected `float`, got `str`'),
        ({"multipleOf": 0}, "/multipleOf is 0; expected `float` > 0.0"),
        ({"const": 2**60}, "beyond 2^53"),
        ({"enum": ["a", 10**400]}, "/enum/1 is an integer of more than 20 digits"),
        ({"minimum": float("nan")}, "is not valid JSON"),
        ({"pattern": 3}, "/pattern is 3; expected `str`, got `int`"),
        ({"$ref": 3}, "/$ref is 3; expected `str`, got `int`"),
        ({"default": {1, 2}}, "is not valid JSON"),
    ],
)
def test_refused_by_name(schema: object, words: str) -> None:
    started = time.process_time()
    assert words in refusal(schema)
    assert time.process_time() - started < 3.0


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}, "uniqueItems": True, "nullable": True, "foo": 3},
        {"type": "string", "format": "iri", "pattern": "(?=a)b"},
        {"oneOf": [{"type": "string"}, {"minLength": 3, "type": "string"}]},
        {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]},
    ],
)
def test_what_only_describes_need_not_be_enforceable(schema: object) -> None:
    check_schema(schema, "tools", is_enforced=False)
    refusal(schema)


@pytest.mark.parametrize("schema", DESCRIBING.values(), ids=DESCRIBING.keys())
def test_what_only_describes_may_be_of_any_draft(schema: dict[str, Any]) -> None:
    check_tools([tool("a"), {"type": "function", "function": {"name": "f", "parameters": schema}}])


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "banana"}, {"pattern": "("}, {"$ref": "#/x"}, {"$ref": "http://x"}, {"$ref": "#"}, nested(5000), 3),
        *({"$ref": "#nowhere"}, {"minLength": -1}, {"minLength": 1.5}, {"maxItems": "3"}, {"anyOf": []}),
        *({"pattern": "[a"}, {"pattern": "a**"}, {"pattern": "a)"}, {"pattern": "b\\"}, {"properties": {"a": 3}}),
        *({"not": {"type": 4}}, {"patternProperties": {"(": {}}}, {"required": [1]}, {"multipleOf": 0}),
    ],
)
def test_what_only_describes_must_still_be_a_schema(schema: object) -> None:
    refusal(schema, is_enforced=False)


@pytest.mark.parametrize("num_links", [1000, 8000])
def test_long_chains_of_references_do_no_harm(num_links: int) -> None:
    """The compiler recurses along them; on an ordinary stack that ends the process."""
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(num_links)}
    check_schema({"$defs": {**links, f"d{num_links}": {"type": "string"}}, "$ref": "#/$defs/d0"}, "response_format")


def test_large_schemas_are_fast() -> None:
    started = time.process_time()
    check_schema({"enum": [f"value number {index}" for index in range(10_000)]}, "response_format")
    assert time.process_time() - started < 5.0


def test_tools_are_checked() -> None:
    check_tools([tool("a"), tool("b-C_9", {"x": {"type": "string", "not": {}}})])
    check_tools([{"type": "function", "function": {"name": "now"}}])
    check_tools([{"type": "function", "function": {"name": "now", "parameters": {}}}])
    check_tools(realistic_tools(60))


def _with_parameters(parameters: object, **more: object) -> list[dict[str, Any]]:
    return [tool("a"), {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]


@pytest.mark.parametrize(
    ("tools", "param", "code"),
    [
        ([tool(f"t{index}") for index in range(2000)], "tools", "array_above_max_length"),
        ([tool("a b")], "tools[0].function.name", "invalid_value"),
        ([tool("a"), tool("")], "tools[1].function.name", "invalid_value"),
        ([tool("x" * 201)], "tools[0].function.name", "invalid_value"),
        ([tool("a\n")], "tools[0].function.name", "invalid_value"),
        ([tool("a"), tool("a")], "tools[1].function.name", "invalid_value"),
        (_with_parameters({"type": "banana"}), "tools[1].function.parameters", "invalid_json_schema"),
        (
            _with_parameters({"properties": {"a": {"pattern": "("}}}),
            "tools[1].function.parameters",
            "invalid_json_schema",
        ),
        (_with_parameters({"$ref": "http://x"}), "tools[1].function.parameters", "invalid_json_schema"),
        (_with_parameters({"type": "string"}), "tools[1].function.parameters", "invalid_json_schema"),
        (
            _with_parameters({"properties": {"a": {"not": {}}}}, strict=True),
            "tools[1].function.parameters",
            "invalid_json_schema",
        ),
    ],
)
def test_wrong_tools_are_refused(tools: list[dict[str, Any]], param: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_tools(tools)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_tool_choice() -> None:
    for choice in ("auto", "none"):
        check_tool_choice(choice, [])  # type: ignore[arg-type]
    check_tool_choice("required", [tool("a")])
    check_tool_choice(NamedTool("a"), [tool("b"), tool("a")])
    for wrong, tools in (("required", []), (NamedTool("c"), [tool("a")]), (NamedTool("a"), [])):
        with pytest.raises(UsageError) as caught:
            check_tool_choice(wrong, tools)  # type: ignore[arg-type]
        assert (caught.value.param, caught.value.code) == ("tool_choice", "invalid_value")


def test_alternatives_with_too_many_optional_properties_are_refused_at_once() -> None:
    """The compiler takes them, but its limit would end the answer at its first character."""

    def alternatives(number: int, **more: Any) -> dict[str, Any]:
        objects = [
            {"type": "object", "properties": {f"p{i}_{j}": {"type": "integer"} for j in range(128)}, **more}
            for i in range(number)
        ]
        return {"anyOf": [*objects[1:], {"$ref": "#/$defs/first"}], "$defs": {"first": objects[0]}}

    message = "/anyOf has alternatives with 2,176 optional properties in total; at most 2,048 can be enforced"
    assert refusal(alternatives(17)) == message
    check_schema(alternatives(16, additionalProperties=False), "x")
    check_schema(alternatives(17), "x", is_enforced=False)
    names = [[f"p{i}_{j}" for j in range(128)] for i in range(17)]
    needed = [{"type": "object", "properties": {name: {} for name in own}, "required": own} for own in names]
    check_schema({"anyOf": needed}, "x")


def test_a_check_never_runs_on_the_thread_of_an_event_loop() -> None:
    """There it would hold up everybody's streams, for up to seconds."""

    async def on_loop() -> None:
        check_schema({"type": "string"}, "x")

    with pytest.raises(BlocksLoopError, match="x is checked on the event loop's thread"):
        asyncio.run(on_loop())


def test_others_go_on_while_a_large_schema_is_checked(smollm2_tokenizer: Tokenizer) -> None:
    """2,000 optional properties, the most that one object may have; before, the server stood still meanwhile."""
    schema = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(2000)}}
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}},
    }
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)  # timed: a clock that ticks whenever the loop is free
            gaps.append(time.monotonic() - last)
            last += gaps[-1]

    async def test() -> float:
        model = fake_model(smollm2_tokenizer, FakeClient(smollm2_tokenizer, Script(["{}", ("", [2])])))
        async with asgi_client(ServerConfig(), [model]) as (client, _):
            ticking = asyncio.create_task(tick())
            began = time.monotonic()
            reply = await client.post("/v1/chat/completions", json=body)
            took_s = time.monotonic() - began
            ticking.cancel()
            assert reply.status_code == 200, reply.text
            return took_s

    took_s = asyncio.run(test())
    assert took_s > 0.1
    assert max(gaps) < max(0.7 * took_s, 0.25)  # the seconds that other streams may wait
