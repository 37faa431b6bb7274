"""One choice: turns the engine's text and tokens into events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from octavo.errors import EngineDeadError
from octavo.outputs import CompletionOutput
from octavo.server.generation.events import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
)
from octavo.server.generation.reasoning import ReasoningParser, ReasoningPart
from octavo.server.tool_parsers import CallArguments, CallStart, ParsedPart, TextPart, ToolParser


class ChoiceReader:
    """Turns the outputs of one choice into its events.

    index: index of the choice. tools: parser of tool calls; None: there are none. reasoning: parser of reasoning; None:
    there is none. Tokens and log-probabilities go with the first event after them, which held-back text can delay.
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
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._is_over = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    def push(self, output: CompletionOutput) -> list[Event]:
        """The events of this output; none after the ChoiceEnd."""
        if self._is_over:
            return []
        self.num_tokens += len(output.token_ids)
        self._token_ids += output.token_ids
        if output.logprobs is not None:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            self._logprobs += [TokenLogprobs(token_id, entries) for token_id, entries in pairs]
        is_last = output.finish_reason is not None
        if self._reasoning is None:
            events = self._answer(output.text, is_last)
        else:
            events = self._think(self._reasoning, output, is_last)
        if output.finish_reason is not None and not self._is_over:
            self._end(events, output.finish_reason, output.stop_reason)
        return events

    def _think(self, reasoning: ReasoningParser, output: CompletionOutput, is_last: bool) -> list[Event]:
        parts = reasoning.push(output.text) if output.text else []
        if is_last:
            parts = [*parts, *reasoning.finish()]
        if reasoning.is_reasoning or any(isinstance(part, ReasoningPart) for part in parts):
            self.num_reasoning_tokens += len(output.token_ids)
        events: list[Event] = []
        for part in parts:
            if isinstance(part, ReasoningPart):
                token_ids, logprobs = self._take_tokens()
                events.append(ReasoningDelta(self._index, part.text, logprobs, token_ids))
            else:
                events += self._answer(part.text, is_last=False)
        if is_last:
            events += self._answer("", is_last=True)
        return events

    def _answer(self, text: str, is_last: bool) -> list[Event]:
        """The events of the text after the reasoning: text for the user and tool calls."""
        if self._tools is None:
            return [self._text(text)] if text else []
        parts = self._tools.push(text) if text else []
        return self._calls([*parts, *self._tools.finish()] if is_last else parts)

    def _calls(self, parts: Iterable[ParsedPart]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if self._is_over:
                break
            if isinstance(part, TextPart):
                events.append(self._text(part.text))
            elif isinstance(part, CallStart):
                if self._num_calls == self._max_calls:
                    self._end(events, "stop", None)
                    continue
                self._num_calls += 1
                call_id = f"call_{secrets.token_hex(12)}"
                events.append(self._call(call_id=call_id, name=part.name))
            elif isinstance(part, CallArguments):
                events.append(self._call(arguments=part.text))
        return events

    def _text(self, text: str) -> TextDelta:
        token_ids, logprobs = self._take_tokens()
        return TextDelta(self._index, text, logprobs, token_ids)

    def _call(self, *, call_id: str | None = None, name: str | None = None, arguments: str = "") -> ToolCallDelta:
        token_ids, logprobs = self._take_tokens()
        return ToolCallDelta(self._index, self._num_calls - 1, call_id, name, arguments, logprobs, token_ids)

    def _take_tokens(self) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        taken = tuple(self._token_ids), tuple(self._logprobs)
        self._token_ids, self._logprobs = [], []
        return taken

    def _end(self, events: list[Event], finish_reason: str, stop_reason: int | str | None) -> None:
        if finish_reason == "abort":
            raise EngineDeadError("the engine ended the request")
        self._is_over = True
        if self._token_ids:
            events.append(self._text(""))
        if self._num_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        events.append(ChoiceEnd(self._index, finish_reason, stop_reason))
