"""Parts of request bodies that several protocols have: things told apart by their `type`, texts or lists of parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from octavo.errors import UsageError
from octavo.server.generation.json_schema import check_tools
from octavo.server.http.json_body import quote

UNSUPPORTED = "unsupported"


def _refuse_type(value: str) -> str:
    raise UsageError(f"the type {quote(value)} is not supported here", code="unsupported_value")


class Unsupported(BaseModel):
    """Anything of a type that we do not have; its `type` is what is refused."""

    # Nothing fits it in the OpenAPI document either: else what has a known type would fit two branches of a `oneOf`.
    model_config = ConfigDict(strict=True, json_schema_extra={"not": {}})

    type: Annotated[str, AfterValidator(_refuse_type)]


def by_type(*known: str, default: str | None = None) -> Callable[[Any], str]:
    """For `pydantic.Discriminator`: the `type` of an object, `default` if it has none, UNSUPPORTED if it is another."""

    def tag(value: Any) -> str:
        if isinstance(value, dict):
            kind = default if value.get("type") is None else value["type"]
        else:
            kind = getattr(value, "type", known[0])  # of a model that is written out, or of what is no object
        return kind if isinstance(kind, str) and kind in known else UNSUPPORTED

    return tag


def text_or_list(value: Any) -> str:
    """For `pydantic.Discriminator`: `text` or `list`."""
    return "text" if isinstance(value, str) else "list"


def check_call_arguments(arguments: str, param: str) -> None:
    """Raises UsageError where the arguments of an earlier call are no JSON object's text. Empty: there were none."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{param} must be the text of a JSON object", param=param, code="invalid_value")


def check_own_tools(tools: Sequence[dict[str, Any]], names: Mapping[str, str]) -> None:
    """`check_tools` for a protocol whose tools have the function's fields themselves, some by other names."""
    try:
        check_tools(tools)
    except UsageError as error:
        message, param = str(error), error.param or "tools"
        for name in ("name", "description", "parameters", "strict"):
            own = names.get(name, name)
            message, param = (text.replace(f".function.{name}", f".{own}") for text in (message, param))
        raise UsageError(message, param=param, code=error.code) from None
