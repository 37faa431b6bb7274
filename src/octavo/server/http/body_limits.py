"""The maximum numbers of items in a body's lists and objects, as its request model declares them.

They are read from the `maxItems` and `maxProperties` of the model's JSON schema, so each limit is declared only once,
with its field. Fields that declare no limit get the defaults below. All limits are checked before the model validates
anything, because validation takes microseconds and hundreds of bytes for each item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from pydantic import BaseModel

MAX_ITEMS = 4096  # in a list or an object of a known form
MAX_TOKEN_IDS = 1 << 20  # in a list of integers
MAX_FREE_ITEMS = 1 << 15  # in a list or an object of any form, such as part of a JSON schema

_Schema: TypeAlias = "Mapping[str, Any]"


class BodyLimits:
    """The limits at one position in a body.

    schemas: the schemas that may apply to the value at this position
    """

    def __init__(self, schemas: Sequence[_Schema], definitions: _Schema) -> None:
        self._definitions = definitions
        self._forms = [form for schema in schemas for form in self._resolved(schema)]
        self._names = {name for form in self._forms for name in form.get("properties", ())}
        self._inside: dict[str | int, BodyLimits] = {}

    @classmethod
    def of_model(cls, model: type[BaseModel]) -> BodyLimits:
        """Return the limits of a whole body."""
        schema = model.model_json_schema()
        return cls([schema], schema.get("$defs", {}))

    def most_items(self, *, in_list: bool) -> int:
        """Return the maximum number of items in the list or object at this position."""
        return self._most_in_list if in_list else self._most_in_object

    @cached_property
    def _most_in_list(self) -> int:
        limits = [form.get("maxItems") or self._usual_items(form) for form in self._of_type("array")]
        return max(limits, default=MAX_ITEMS)  # without limits it has a wrong type, and the model refuses it

    @cached_property
    def _most_in_object(self) -> int:
        limits = [form.get("maxProperties") or _usual_properties(form) for form in self._of_type("object")]
        return max(limits, default=MAX_ITEMS)

    def inside(self, key: str | int) -> BodyLimits:
        """Return the limits of an item."""
        place = 0 if isinstance(key, int) else key if key in self._names else ""
        if (known := self._inside.get(place)) is None:
            found = [_item(form, place) for form in self._forms]
            known = self._inside[place] = BodyLimits(found, self._definitions)
        return known

    def _of_type(self, kind: str) -> list[_Schema]:
        return [form for form in self._forms if form.get("type", kind) == kind]

    def _usual_items(self, form: _Schema) -> int:
        items = self._resolved(form.get("items", {}))
        kinds = {item.get("type") for item in items}
        return MAX_TOKEN_IDS if "integer" in kinds else MAX_FREE_ITEMS if None in kinds else MAX_ITEMS

    def _resolved(self, schema: _Schema) -> list[_Schema]:
        """Return the schemas behind references and alternatives."""
        stack, found = [schema], []
        while stack:
            item = stack.pop()
            if isinstance(reference := item.get("$ref"), str):
                stack.append(self._definitions[reference.rpartition("/")[2]])
                continue
            inner = [*item.get("anyOf", ()), *item.get("oneOf", ()), *item.get("allOf", ())]
            if inner:
                stack += inner
            else:
                found.append(item)
        return found


def _item(form: _Schema, place: str | int) -> _Schema:
    others = form.get("additionalProperties", {})
    found = form.get("items", {}) if place == 0 else form.get("properties", {}).get(place, others)
    return found if isinstance(found, Mapping) else {}


def _usual_properties(form: _Schema) -> int:
    is_free = "properties" not in form and form.get("additionalProperties", True) in (True, {})
    return MAX_FREE_ITEMS if is_free else MAX_ITEMS
