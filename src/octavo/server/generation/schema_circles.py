"""Finds schemas that refer to each other without end, from their dependencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote


def same_value(schema: object, pointer: str) -> list[str]:
    """JSON pointers to the schemas that apply to the same value as the schema at `pointer`."""
    if not isinstance(schema, dict):
        return []
    found = [unquote(reference[1:])] if isinstance(reference := schema.get("$ref"), str) else []
    for keyword in ("allOf", "anyOf", "oneOf"):
        if isinstance(members := schema.get(keyword), list):
            found += [f"{pointer}/{keyword}/{index}" for index in range(len(members))]
    return found


def find_circle(schemas: Mapping[str, object]) -> str | None:
    """The pointer to a schema that applies itself to the same value again; None: there is none. schemas: by pointer.

    Repeatedly removes the schemas that refer to no remaining one; those left lead into a circle.
    """
    targets = {pointer: same_value(schema, pointer) for pointer, schema in schemas.items()}
    finite = _settled({pointer: [[target] for target in found] for pointer, found in targets.items()})
    pointer = next((pointer for pointer in targets if pointer not in finite), None)
    path: set[str] = set()
    while pointer is not None and pointer not in path:
        path.add(pointer)
        pointer = next((target for target in targets[pointer] if target not in finite), None)
    return pointer


def find_endless(schemas: Mapping[str, object]) -> str | None:
    """The pointer to a schema whose every value contains another value of it, so that none is finite."""
    finite = _settled({pointer: list(_needs(schema, pointer)) for pointer, schema in schemas.items()})
    return next((pointer for pointer in schemas if pointer not in finite), None)


def _needs(schema: object, pointer: str) -> Iterator[list[str]]:
    """Groups of schemas; this schema has a finite value only if one of each group has one."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield [unquote(reference[1:])]
    for keyword in ("allOf", "anyOf", "oneOf"):
        members = [f"{pointer}/{keyword}/{index}" for index in range(len(schema.get(keyword, ())))]
        if members:
            yield from [[member] for member in members] if keyword == "allOf" else [members]
    if schema.get("type") in ("object", ["object"]):
        properties = schema.get("properties", {})
        yield from (
            [f"{pointer}/properties/{escaped(name)}"] for name in schema.get("required", ()) if name in properties
        )
    elif schema.get("type") in ("array", ["array"]):
        yield from ([f"{pointer}/{place}"] for place in _needed_items(schema))


def _needed_items(schema: dict[str, Any]) -> list[str]:
    """Pointers to the schemas of the items that an array must have."""
    num_needed = schema.get("minItems", 0)
    items = schema.get("items")
    keyword, prefix = ("items", items) if isinstance(items, list) else ("prefixItems", schema.get("prefixItems", []))
    needed = [f"{keyword}/{index}" for index in range(min(num_needed, len(prefix)))]
    return [*needed, "items"] if isinstance(items, dict) and num_needed > len(prefix) else needed


def _settled(needs: Mapping[str, Sequence[Sequence[str]]]) -> set[str]:
    """The schemas with a finite value: each of their groups has a settled or an unknown member. Linear time."""
    open_groups = {
        pointer: {index for index, group in enumerate(groups) if all(member in needs for member in group)}
        for pointer, groups in needs.items()
    }
    waiting: dict[str, list[tuple[str, int]]] = {}
    for pointer, groups in needs.items():
        for index in open_groups[pointer]:
            for member in groups[index]:
                waiting.setdefault(member, []).append((pointer, index))
    ends = [pointer for pointer, groups in open_groups.items() if not groups]
    for end in ends:
        for pointer, index in waiting.get(end, ()):
            if index in open_groups[pointer]:
                open_groups[pointer].discard(index)
                if not open_groups[pointer]:
                    ends.append(pointer)
    return set(ends)


def escaped(name: str) -> str:
    """A name escaped for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
