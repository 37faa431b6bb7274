"""What an endpoint asks for, in no protocol's own words, and what it gets back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias

from octavo.generation_request import RequestOptions
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.generation.events import Event

ToolChoice: TypeAlias = "Literal['auto', 'none', 'required'] | NamedTool"


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


def read_options(body: object) -> RequestOptions:
    """The options of a request: each from the field of its body that has its name, if that is given.

    Raises UsageError for a wrong value.
    """
    given = {option.name: getattr(body, option.name) for option in fields(RequestOptions)}
    return RequestOptions(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What requests of every kind can say beside their prompt.

    options: see `read_options`. tenant: whose request this is, by the API key: nobody else can cancel it or share its
    prefix cache, which `cache_salt` separates further. truncate_prompt_tokens: keep only so many tokens, the last ones,
    or all but the middle; -1: as many as fit; None: a prompt beyond the context is an error. max_tokens_may_shrink:
    max_tokens is a default and no wish, so the context may end the answer before. offers_truncation: the protocol has a
    field for truncate_prompt_tokens, which an error then proposes. constraint_field: the field of the request with the
    structured outputs, for errors about them.
    """

    params: SamplingParams | BeamSearchParams
    options: RequestOptions = field(default_factory=RequestOptions)
    tenant: str = ""
    truncate_prompt_tokens: int | None = None
    offers_truncation: bool = True
    truncation_side: Literal["left", "middle"] = "left"
    max_tokens_may_shrink: bool = False
    constraint_field: str = "structured_outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSpec(Common):
    """A conversation. messages: OpenAI's shape, checked. tools: OpenAI's shape, checked, with their schemas.

    separates_reasoning: what the model thinks comes as ReasoningDelta instead of as text.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    separates_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec(Common):
    """Prompts to continue as they are. The choices of prompt i have the indices i * n to i * n + n - 1."""

    prompts: Sequence[str | Sequence[int]]


class Generation(Protocol):
    """A running request: an async iterator of `Event`s, the last of them one `Usage`.

    Raises what ended the request otherwise: an ApiError or OctavoError.
    """

    @property
    def request_id(self) -> str:
        """The server's own id, for cancelling it and for the log."""

    @property
    def prompt_token_ids(self) -> Sequence[Sequence[int]]:
        """Of each prompt, as the engine got them; a conversation is one prompt."""

    @property
    def num_truncated_tokens(self) -> int:
        """How many tokens of the prompts were cut off because the request asked for it."""

    @property
    def prompt_logprobs(self) -> Sequence[Any]:
        """Of each prompt, `RequestOutput.prompt_logprobs`; complete with the first event."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Itself."""

    async def __anext__(self) -> Event:
        """The next event."""

    async def aclose(self) -> None:
        """Ends the request if it still runs."""
