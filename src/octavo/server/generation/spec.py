"""Requests for an answer, independent of the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeAlias

from octavo.errors import UsageError
from octavo.generation_request import BATCH_PRIORITY, RequestOptions
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.errors import refuse
from octavo.server.generation.content import ImagePlan, Media, MessageContent
from octavo.server.generation.infill import Infill

TextOrIds: TypeAlias = "str | Sequence[int | str] | Infill"
ToolChoice: TypeAlias = "Literal['auto', 'none', 'required'] | NamedTool"


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The name of the tool that must be called."""

    name: str


def given(body: object, *names: str) -> dict[str, Any]:
    """Return the fields with these names that are not None."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def read_options(body: object, **spelled: Any) -> RequestOptions:
    """Read the options of a request from the fields of its body that have the same names, if they are given.

    spelled: options whose fields have another name in the body; a value of None means not given

    With the service tier `flex`, the request gets the priority of batches. Raises UsageError for an invalid value.
    """
    tier = {"priority": BATCH_PRIORITY} if getattr(body, "service_tier", None) == "flex" else {}
    others = {name: value for name, value in spelled.items() if value is not None}
    named = given(body, *(option.name for option in fields(RequestOptions)))
    for name, value in others.items():
        if named.setdefault(name, value) != value:
            raise refuse(name, f"is {named[name]}, and {value} under its other name; give one of them", "invalid_value")
    return RequestOptions(**tier | named)


class Breakpoint(NamedTuple):
    """A position in a prompt. The cache up to this position is kept for `seconds`.

    texts: texts that a conversation contains in this order; the position is the end of the last one. None means the end
    of the prompt.
    is_tool: the last text is the name of a tool
    """

    seconds: float
    texts: tuple[str, ...] | None = None
    is_tool: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The fields that all kinds of requests share, besides the prompt.

    given: fields of params that the request sets; the model's defaults fill the rest
    options: see `read_options`
    tenant: identifies the API key. Only the same tenant can cancel the request or share its prefix cache. `cache_salt`
    separates the caches further.
    truncate_prompt_tokens: number of tokens to keep, or -1 to keep all tokens that fit. None makes a prompt beyond the
    context an error.
    truncation_side: where tokens are dropped. `left` keeps the prompt's end, `middle` both ends, `right` the beginning.
    `turns` drops the oldest turns of a conversation first, and cuts the middle only if the last turn is too long.
    constraint_field: the request's field for the structured outputs, to name in errors about them
    is_followed: see `GenerationRequest`
    """

    params: SamplingParams | BeamSearchParams
    given: frozenset[str] = frozenset()
    options: RequestOptions = field(default_factory=RequestOptions)
    tenant: str = ""
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "middle", "right", "turns"] = "left"
    constraint_field: str = "structured_outputs"
    is_followed: bool = False
    breakpoints: tuple[Breakpoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSpec(Common):
    """A conversation.

    messages: checked, in OpenAI's format, with a `MessageContent` that `plan_chat` turns into one string
    tools: checked, in OpenAI's format, with their schemas
    thinking: see `reasoning_arguments`
    reasoning_effort: given to the chat template; `none` switches reasoning off
    earlier_token_ids: tokens of an earlier conversation that this one continues
    images: the images in the messages, as `plan_chat` finds them
    """

    messages: Sequence[Mapping[str, MessageContent | Any]]
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    thinking: Literal["enabled", "disabled", "adaptive"] | None = "adaptive"
    reasoning_effort: str | None = None
    earlier_token_ids: Sequence[int] = ()
    images: ImagePlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec(Common):
    """Prompts to continue as they are. With n choices per prompt, prompt i has the choices i * n to i * n + n - 1.

    media: the request's parts that are not text, for each prompt
    media_marker: the text that represents such a part in a prompt
    """

    prompts: Sequence[TextOrIds]
    media: Sequence[Media] = ()
    media_marker: str = ""


@contextmanager
def constraint_named(field: str) -> Iterator[None]:
    """Make UsageErrors about `structured_outputs` name the request's own field for the constraint."""
    try:
        yield
    except UsageError as error:
        param = error.param or ""
        if field == "structured_outputs" or param.partition(".")[0] != "structured_outputs":
            raise
        code = "invalid_json_schema" if param == "structured_outputs.json" else error.code
        raise UsageError(str(error).replace(param, field, 1), param=field, code=code) from None
