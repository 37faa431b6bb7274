"""The template variables that turn a model's thinking on or off and set its effort."""

from __future__ import annotations

from typing import Any

from octavo.server.errors import refuse
from octavo.server.reasoning.reasoning_format import find_reasoning_format

_EFFORT = "reasoning_effort"
_SWITCH = "enable_thinking"


def reasoning_arguments(
    chat_template: str, thinking: str | None, effort: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the template variables for this thinking and effort, and which of the two fields have no effect.

    thinking: `enabled`, `disabled`, or `adaptive` if the model should decide; None means off where possible
    effort: reasoning effort; `none` switches reasoning off

    Raises UsageError naming `thinking.type` or `reasoning_effort` if the model's reasoning cannot be switched off.
    """
    arguments: dict[str, Any] = {}
    ignored: list[str] = []
    is_marked = find_reasoning_format(chat_template) is not None
    no_switch = "switches thinking off, but this model's chat template has no such switch; leave it out"
    if thinking != "adaptive" and _SWITCH in chat_template:
        arguments[_SWITCH] = thinking == "enabled"
    elif thinking == "enabled" and not is_marked:
        ignored.append("thinking")
    elif thinking == "disabled" and is_marked:
        raise refuse("thinking.type", no_switch)
    if effort is not None and _EFFORT in chat_template:
        arguments[_EFFORT] = effort
    elif effort == "none" and _SWITCH in chat_template:
        arguments[_SWITCH] = False
    elif effort == "none" and is_marked:
        raise refuse(_EFFORT, no_switch)
    elif effort is not None:
        ignored.append(_EFFORT)
    return arguments, tuple(ignored)
