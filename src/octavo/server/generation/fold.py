"""The answer that is not streamed, as the fold of the events."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.server.generation.events import (
    ChoiceEnd,
    ChoiceEvent,
    Event,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    Usage,
)


@dataclass(slots=True)
class ToolCall:
    """A complete call. arguments: JSON text as generated."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """A complete choice. text, reasoning: None if the model generated none."""

    text: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Folding:
    """The fold over the events of a request; `choices` is the result."""

    def __init__(self) -> None:
        self._choices: dict[int, _Building] = {}

    def push(self, event: Event) -> None:
        """Adds the next event."""
        if not isinstance(event, Usage):
            self._choices.setdefault(event.index, _Building()).push(event)

    def choices(self) -> list[Choice]:
        """The choices in the order of their indices."""
        return [self._choices[index].build() for index in sorted(self._choices)]


class _Building:
    """A choice under construction; its strings are joined once."""

    def __init__(self) -> None:
        self._choice = Choice()
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._arguments: list[list[str]] = []

    def push(self, event: ChoiceEvent) -> None:
        choice = self._choice
        if isinstance(event, ChoiceEnd):
            choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
            return
        choice.logprobs += event.logprobs
        choice.token_ids += event.token_ids
        if isinstance(event, TextDelta):
            self._texts.append(event.text)
        elif isinstance(event, ReasoningDelta):
            self._reasonings.append(event.text)
        else:
            if event.call_id is not None:
                choice.tool_calls.append(ToolCall(event.call_id, event.name or ""))
                self._arguments.append([])
            self._arguments[event.call_index].append(event.arguments)

    def build(self) -> Choice:
        choice = self._choice
        choice.text = "".join(self._texts) or None
        choice.reasoning = "".join(self._reasonings) or None
        for call, arguments in zip(choice.tool_calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        return choice
