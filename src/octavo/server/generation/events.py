"""The events of an answer. Every protocol's endpoint turns them into its own format.

The answer that is not streamed is the fold of the same events, so the two cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
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
