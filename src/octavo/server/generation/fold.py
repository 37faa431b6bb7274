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
    """A complete call."""

    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """JSON text as generated."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Choice:
    """A choice, complete with its last event."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str | None:
        """None if the model generated none; likewise `reasoning`."""
        return "".join(self.texts) or None

    @property
    def reasoning(self) -> str | None:
        return "".join(self.thoughts) or None

    def push(self, event: ChoiceEvent) -> None:
        """Adds the next event."""
        if isinstance(event, ChoiceEnd):
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
            return
        self.logprobs += event.logprobs
        self.token_ids += event.token_ids
        if isinstance(event, TextDelta):
            self.texts.append(event.text)
        elif isinstance(event, ReasoningDelta):
            self.thoughts.append(event.text)
        else:
            if event.call_id is not None:
                self.tool_calls.append(ToolCall(event.call_id, event.name or ""))
            self.tool_calls[event.call_index].pieces.append(event.arguments)


class Folding:
    """The fold over the events of a request; `choices` is the result."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}

    def push(self, event: Event) -> None:
        """Adds the next event."""
        if not isinstance(event, Usage):
            self._choices.setdefault(event.index, Choice()).push(event)

    def choices(self) -> list[Choice]:
        """The choices in the order of their indices."""
        return [self._choices[index] for index in sorted(self._choices)]
