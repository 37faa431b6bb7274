"""The events of an answer. Every protocol's endpoint turns them into its own format.

The answer that is not streamed is the fold of the same events, so the two cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from octavo.outputs import Logprob, RequestMetrics


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One generated token's log-probability and those of the most likely ones, the token itself first."""

    token_id: int
    entries: dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the text that the user sees. `logprobs` and `token_ids` are those of its tokens."""

    index: int  # the choice
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning before the answer."""

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first delta of a call has its id and name but no arguments; the joined arguments
    of all its deltas are its JSON text."""

    index: int
    call_index: int  # 0 for the first call of this choice
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The last event of a choice. stop_reason: the stop string or token id; None: the model's own end."""

    index: int
    finish_reason: str  # stop, length or tool_calls
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The last event of all."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int
    metrics: RequestMetrics


ChoiceEvent: TypeAlias = "TextDelta | ReasoningDelta | ToolCallDelta | ChoiceEnd"
Event: TypeAlias = "ChoiceEvent | Usage"


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
