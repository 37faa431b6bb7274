"""The chat template's variables that switch or vary a model's reasoning."""

from __future__ import annotations

from typing import Any

from octavo.errors import UsageError
from octavo.server.errors import refuse
from octavo.server.generation.reasoning import find_reasoning_format

_EFFORT = "reasoning_effort"
_SWITCH = "enable_thinking"


def effort_arguments(chat_template: str | None, effort: str, param: str) -> dict[str, Any]:
    """The template's variables for this reasoning effort; `none` switches reasoning off.

    Raises UsageError if the template has no such variable.
    """
    source = chat_template or ""
    if _EFFORT in source:
        return {_EFFORT: effort}
    if _SWITCH in source and effort == "none":
        return {_SWITCH: False}
    message = f"{param} is unknown to this model's chat template; leave it out"
    raise UsageError(message, param=param, code="unsupported_parameter")


def switch_arguments(chat_template: str | None, wanted: bool | None, param: str) -> dict[str, Any]:
    """The template's variables that switch reasoning on or off. None: off if that is possible.

    Raises UsageError if the model does not support it.
    """
    source = chat_template or ""
    if _SWITCH in source:
        return {_SWITCH: bool(wanted)}
    thinks = find_reasoning_format(source) is not None
    if wanted and not thinks:
        raise refuse(param, "asks for thinking, but this model does not mark its thinking; leave it out")
    if wanted is False and thinks:
        raise refuse(param, "switches thinking off, but this model's chat template has no such switch; leave it out")
    return {}
