"""Tool parameters as found in practice: JSON schemas of all drafts, which nobody enforces to the letter."""

from __future__ import annotations

from typing import Any


def argument(**schema: Any) -> dict[str, Any]:
    """Return the parameters of a tool with one argument."""
    return {"type": "object", "properties": {"a": schema}}


DESCRIBING: dict[str, dict[str, Any]] = {
    "draft 4": {"$schema": "http://json-schema.org/draft-04/schema#", **argument(type="string")},
    "draft 3": {
        "$schema": "http://json-schema.org/draft-03/schema#",
        **argument(type="any", required=True, divisibleBy=2),
    },
    "no draft": {"$schema": "http://json-schema.org/schema#", **argument(type="string")},
    "boolean exclusiveMinimum": argument(type="integer", minimum=0, exclusiveMinimum=True, exclusiveMaximum=False),
    "bounds of int64": argument(type="integer", minimum=-(2**63), maximum=2**63 - 1),
    "a bound as JavaScript prints it": argument(type="integer", maximum=9223372036854776000),
    "bounds of uint64 in const": argument(const=2**64 - 1),
    "int64 in an enum": argument(type="integer", enum=[2**63 - 1, 1]),
    "an empty enum": argument(enum=[]),
    "minLength": argument(type="string", minLength=20_000),
    "maxLength": argument(type="string", maxLength=5_000_000_000),
    "maxItems": argument(type="array", items={}, maxItems=2**63 - 1),
    "a length with a point": argument(type="string", minLength=1.0),
    "an anchor": {**argument(**{"$ref": "#foo"}), "$defs": {"F": {"$anchor": "foo", "type": "string"}}},
    "an anchor of draft 6": {**argument(**{"$ref": "#foo"}), "definitions": {"F": {"$id": "#foo"}}},
    "an id": {
        "$id": "https://example.com/a/root.json",
        **argument(**{"$ref": "part.json#/$defs/x"}),
        "$defs": {"F": {"$id": "https://example.com/a/part.json", "$defs": {"x": {}}}},
    },
    "a pointer within a part with an id": {
        **argument(type="string"),
        "$defs": {"F": {"$id": "part.json", "$defs": {"x": {}}, "items": {"$ref": "#/$defs/x"}}},
    },
    "dependencies of both kinds": {**argument(), "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
    "null or an object": {"type": ["object", "null"], "properties": {}},
    "a list of one type": {"type": ["object"], "properties": {}},
    "3,000 properties": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}},
    "a circle through a property": {**argument(**{"$ref": "#"}), "required": ["a"]},
    **{
        f"pattern {pattern}": argument(type="string", pattern=pattern)
        for pattern in (
            r"^(?=.*\d)(?<y>\d{4})\k<y>$",
            r"^(?!\s)\p{L}+$",
            "(?<!a+)b",
            "^[^]+$",
            r"[\w-]+\_\-\e\c",
            "a{,3}{",
            "(?P<n>a)(?P=n)",
            r"\bword\b \1",
            r"[\ud800-\udfff]",
            "(?m)^a$",
        )
    },
}
