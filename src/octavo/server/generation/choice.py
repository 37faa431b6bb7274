"""One choice: turns the engine's text and tokens into events."""

from __future__ import annotations

import secrets
from itertools import chain
from typing import Any

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
from octavo.server.tool_parsers.answer import CallArguments, CallStart, ParsedPart
from octavo.server.tool_parsers.tool_format import ToolParser


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
        """The parts of the text of this output, with what was held back before."""
        is_last = output.finish_reason is not None
        parts: list[Any] = [output.text] if output.text else []
        if (reasoning := self._reasoning) is not None:
            parts = [*(reasoning.push(output.text) if output.text else ()), *(reasoning.finish() if is_last else ())]
            if reasoning.is_reasoning or any(isinstance(part, ReasoningPart) for part in parts):
                self.num_reasoning_tokens += len(output.token_ids)
        if (tools := self._tools) is not None:
            parsed = [tools.push(part) if isinstance(part, str) else [part] for part in parts]
            parts = [*chain(*parsed), *(tools.finish() if is_last else ())]
        return parts

    def _event(self, part: ParsedPart | ReasoningPart) -> Event:
        taken: Any = {"logprobs": tuple(self._logprobs), "token_ids": tuple(self._token_ids)}
        self._token_ids, self._logprobs = [], []
        if isinstance(part, str):
            return TextDelta(self._index, part, **taken)
        if isinstance(part, ReasoningPart):
            return ReasoningDelta(self._index, part.text, **taken)
        if isinstance(part, CallArguments):
            return ToolCallDelta(self._index, self._num_calls - 1, arguments=part.text, **taken)
        self._num_calls += 1
        return ToolCallDelta(self._index, self._num_calls - 1, f"call_{secrets.token_hex(12)}", part.name, **taken)

    def _end(self, events: list[Event], finish_reason: str, stop_reason: int | str | None) -> None:
        if finish_reason == "abort":
            raise EngineDeadError("the engine ended the request")
        self._is_over = True
        if self._token_ids:
            events.append(self._event(""))
        if self._num_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        events.append(ChoiceEnd(self._index, finish_reason, stop_reason))
