"""Events of an answer. Every protocol's endpoint turns them into its own format.

An answer that is not streamed is assembled from the same events, so it cannot differ from a streamed answer.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from octavo.errors import EngineDeadError
from octavo.generation_request import Pin
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics
from octavo.server.reasoning.reasoning_format import ReasoningParser, ReasoningPart
from octavo.server.tool_parsers.answer import CallArguments, CallStart, ParsedPart
from octavo.server.tool_parsers.tool_format import ToolParser


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one generated token and of the most likely tokens at its position. The generated token
    is first.
    """

    token_id: int
    entries: dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the text that the user sees, with its tokens' `logprobs` and `token_ids`."""

    index: int  # index of the choice
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
    """A piece of a tool call. The first delta of a call contains its id and name but no arguments. The joined arguments
    of all deltas are the call's JSON text.
    """

    index: int
    call_index: int  # 0 for the choice's first call
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The last event of a choice.

    stop_reason: the stop string or token id that ended it, or None if the model ended it
    """

    index: int
    finish_reason: str  # stop, length or tool_calls
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The last event of an answer: its token counts and its metrics."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int
    metrics: RequestMetrics
    num_image_tokens: int = 0  # image tokens in the prompt
    pins: tuple[Pin, ...] = ()

    @property
    def created_tokens(self) -> dict[float, int]:
        """Return the number of tokens that pins have added to the cache, by the number of seconds for which the pins
        keep them.
        """
        created: dict[float, int] = {}
        start = self.num_cached_tokens
        for num_tokens, seconds in self.pins:
            created[seconds] = created.get(seconds, 0) + max(num_tokens - start, 0)
            start = max(start, num_tokens)
        return created


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress of a prompt's prefill. Sent only if the request asks for it."""

    index: int  # index of the prompt's first choice
    num_tokens: int
    num_cached: int
    num_processed: int  # including cached tokens
    seconds: float  # since the start of the computation


ChoiceEvent: TypeAlias = "TextDelta | ReasoningDelta | ToolCallDelta | ChoiceEnd"
Event: TypeAlias = "ChoiceEvent | PromptProgress | Usage"


class ChoiceReader:
    """Turns the outputs of one choice into events.

    index: index of the choice
    tools: parser of tool calls, or None if the answer cannot contain any
    reasoning: parser of reasoning, or None if the answer cannot contain any

    Tokens and their log-probabilities are attached to the next event, even if it is delayed because text is held back.
    """

    def __init__(
        self,
        index: int,
        tools: ToolParser | None = None,
        reasoning: ReasoningParser | None = None,
        *,
        parallel_tool_calls: bool = True,
    ) -> None:
        self._index = index
        self._tools = tools
        self._reasoning = reasoning
        self._max_calls = None if parallel_tool_calls else 1
        self._num_calls = 0
        self._arguments: list[str] = []  # pieces of the last call's arguments
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._is_over = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    def push(self, output: CompletionOutput) -> list[Event]:
        """Return the events of this output. After the ChoiceEnd, there are no more events."""
        if self._is_over:
            return []
        self.num_tokens += len(output.token_ids)
        self._token_ids += output.token_ids
        if output.logprobs is not None:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            self._logprobs += [TokenLogprobs(token_id, entries) for token_id, entries in pairs]
        events: list[Event] = []
        for part in self._parts(output):
            if isinstance(part, CallStart) and self._num_calls == self._max_calls:
                self._end(events, "stop", None)
                return events
            events.append(self._event(part))
        if output.finish_reason is not None:
            self._end(events, output.finish_reason, output.stop_reason)
        return events

    def _parts(self, output: CompletionOutput) -> list[ParsedPart | ReasoningPart]:
        """Return the parts of this output's text, including text that was held back before."""
        is_last, cut_before = output.finish_reason is not None, _cut_before(output)
        parts: list[Any] = [output.text] if output.text else []
        if (reasoning := self._reasoning) is not None:
            parts = reasoning.push(output.text) if output.text else []
            parts = [*parts, *(reasoning.finish(cut_before) if is_last else ())]
            if reasoning.is_reasoning or any(isinstance(part, ReasoningPart) for part in parts):
                self.num_reasoning_tokens += len(output.token_ids)
        if (tools := self._tools) is not None:
            parsed = [tools.push(part) if isinstance(part, str) else [part] for part in parts]
            parts = [*chain(*parsed), *(tools.finish(cut_before) if is_last else ())]
        return parts

    def _event(self, part: ParsedPart | ReasoningPart) -> Event:
        taken = tuple(self._logprobs), tuple(self._token_ids)
        self._token_ids, self._logprobs = [], []
        if isinstance(part, str):
            return TextDelta(self._index, part, *taken)
        if isinstance(part, ReasoningPart):
            return ReasoningDelta(self._index, part.text, *taken)
        if isinstance(part, CallArguments):
            self._arguments.append(part.text)
            return ToolCallDelta(self._index, self._num_calls - 1, None, None, part.text, *taken)
        self._num_calls += 1
        self._arguments.clear()
        call_id = f"call_{secrets.token_hex(12)}"
        return ToolCallDelta(self._index, self._num_calls - 1, call_id, part.name, "", *taken)

    def _end(self, events: list[Event], finish_reason: str, stop_reason: int | str | None) -> None:
        if finish_reason == "abort":
            raise EngineDeadError("the engine ended the request")
        self._is_over = True
        if self._token_ids:
            events.append(self._event(""))
        # If a stop string cuts a call, there is no call to make.
        if self._num_calls and finish_reason == "stop" and (stop_reason is None or is_object("".join(self._arguments))):
            finish_reason = "tool_calls"
        events.append(ChoiceEnd(self._index, finish_reason, stop_reason))


def _cut_before(output: CompletionOutput) -> str | None:
    """Return the stop string that cut off an answer, None if the model ended the answer itself, or "" in all other
    cases.
    """
    if output.finish_reason == "stop" and output.stop_reason is None:
        return None
    return output.stop_reason if isinstance(output.stop_reason, str) else ""


def is_object(arguments: str) -> bool:
    """Return True if the arguments of a call form a complete JSON object."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(slots=True)
class ToolCall:
    """A complete tool call."""

    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The arguments' JSON text, as generated."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Choice:
    """A choice, assembled from its events. It is complete once its ChoiceEnd has been added."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str | None:
        """The choice's text, or None if the model generated none. The same applies to `reasoning`."""
        return "".join(self.texts) or None

    @property
    def reasoning(self) -> str | None:
        return "".join(self.thoughts) or None

    def push(self, event: ChoiceEvent) -> None:
        """Add the next event."""
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
