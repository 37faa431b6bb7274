"""Finds schemas that refer to each other without end, from their dependencies.

Schemas are given by their JSON pointers, each checked, with all schemas within them and all that they refer to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote


def find_circle(schemas: Mapping[str, Any]) -> str | None:
    """The pointer to a schema that applies itself to the same value again; None: there is none."""
    targets = {
        pointer: [member for group in _same_value(schema, pointer) for member in group]
        for pointer, schema in schemas.items()
    }
    try:
        TopologicalSorter(targets).prepare()
    except CycleError as error:
        return str(error.args[1][0])
    return None


def find_endless(schemas: Mapping[str, Any]) -> str | None:
    """The pointer to a schema whose every value contains another value of it, so that none is finite. Linear time."""
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


def _same_value(schema: Any, pointer: str) -> list[list[str]]:
    """Groups of schemas for the same value, which has to satisfy one of each group."""
    if isinstance(schema, bool):
        return []
    members = {
        keyword: [f"{pointer}/{keyword}/{index}" for index in range(len(schema.get(keyword, ())))]
        for keyword in ("allOf", "anyOf", "oneOf")
    }
    referred = [[unquote(schema["$ref"][1:])]] if "$ref" in schema else []
    return [*referred, *([member] for member in members["allOf"]), *filter(None, (members["anyOf"], members["oneOf"]))]


def _needs(schema: Any, pointer: str) -> list[list[str]]:
    """Groups of schemas; this schema has a finite value only if one of each group has one."""
    if isinstance(schema, bool) or "enum" in schema or "const" in schema:
        return []
    places: list[str] = []
    if schema.get("type") in ("object", ["object"]):
        properties = schema.get("properties", {})
        places = [f"properties/{escaped(name)}" for name in schema.get("required", ()) if name in properties]
    elif schema.get("type") in ("array", ["array"]):
        places = _needed_items(schema)
    return [*_same_value(schema, pointer), *([f"{pointer}/{place}"] for place in places)]


def _needed_items(schema: dict[str, Any]) -> list[str]:
    """Pointers to the schemas of the items that an array must have."""
    num_needed, items = schema.get("minItems", 0), schema.get("items")
    keyword, prefix = ("items", items) if isinstance(items, list) else ("prefixItems", schema.get("prefixItems", []))
    needed = [f"{keyword}/{index}" for index in range(min(num_needed, len(prefix)))]
    return [*needed, "items"] if isinstance(items, dict) and num_needed > len(prefix) else needed


def escaped(name: str) -> str:
    """A name escaped for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
