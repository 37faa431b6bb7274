"""Switches of a model's thinking, as far as its chat template has any."""

from __future__ import annotations

from typing import Any

from octavo.errors import UsageError
from octavo.server.errors import refuse
from octavo.server.generation.reasoning import find_reasoning_format

_EFFORT = "reasoning_effort"
_SWITCH = "enable_thinking"


def effort_arguments(chat_template: str | None, effort: str, param: str) -> dict[str, Any]:
    """What to tell the template so that the model thinks with this effort, `none` for not at all.

    Raises UsageError where the template has no way to say it.
    """
    source = chat_template or ""
    if _EFFORT in source:
        return {_EFFORT: effort}
    if _SWITCH in source and effort == "none":
        return {_SWITCH: False}
    message = f"{param} is unknown to this model's chat template; leave it out"
    raise UsageError(message, param=param, code="unsupported_parameter")


def switch_arguments(chat_template: str | None, wanted: bool | None, param: str) -> dict[str, Any]:
    """What to tell the template to switch thinking on or off. None: off where it can be.

    Raises UsageError where the model cannot do what is wanted.
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
