"""The body of `/v1/chat/completions`, and the request that it makes of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from octavo.errors import UsageError
from octavo.sampling_params import MAX_LOGPROBS, BeamSearchParams, SamplingParams
from octavo.server.errors import refuse
from octavo.server.generation.json_schema import check_tool_choice, check_tools
from octavo.server.generation.reasoning import effort_arguments
from octavo.server.generation.spec import ChatSpec, read_options
from octavo.server.http.json_body import Int
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.chat_messages import (
    MAX_MESSAGES,
    Message,
    NamedToolChoice,
    TemplateFields,
    Tool,
    chat_messages,
    chat_tool_choice,
    chat_tools,
)
from octavo.server.protocols.sampling_fields import SamplingFields


class ChatCompletionRequest(SamplingFields, TemplateFields):
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def to_chat_spec(body: ChatCompletionRequest, tenant: str) -> ChatSpec:
    """The request to a model, apart from `reasoning_effort`. Raises UsageError for what cannot be honoured."""
    params = _sampling_params(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "needs logprobs: true", "invalid_value")
    if body.prompt_logprobs is not None and body.stream:
        raise refuse("prompt_logprobs", "needs stream: false", "invalid_value")
    arguments = body.template_arguments(body.messages)
    limit, side = body.truncation()
    messages, tools = chat_messages(body.messages), chat_tools(body.tools)
    tool_choice = chat_tool_choice(body.tool_choice, bool(tools))
    check_tools(tools)
    check_tool_choice(tool_choice, tools)
    return ChatSpec(
        params=params,
        options=read_options(body),
        constraint_field=body.constraint_field,
        tenant=tenant,
        truncate_prompt_tokens=limit,
        truncation_side=side,
        max_tokens_may_shrink=body.max_tokens is None and body.max_completion_tokens is None,
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_arguments=arguments,
    )


def with_effort(spec: ChatSpec, body: ChatCompletionRequest, model: ServedModel) -> ChatSpec:
    """The same for a loaded model, whose template must know the effort. Raises UsageError."""
    if body.reasoning_effort is None:
        return spec
    effort = effort_arguments(model.tokenizer.chat_template, body.reasoning_effort, "reasoning_effort")
    return replace(spec, template_arguments={**spec.template_arguments, **effort})


def _sampling_params(body: ChatCompletionRequest) -> SamplingParams | BeamSearchParams:
    limit, other = body.max_tokens, body.max_completion_tokens
    if limit is not None and other is not None and limit != other:
        reason = f"is {limit} and max_completion_tokens is {other}; give one of them"
        raise refuse("max_tokens", reason, "invalid_value")
    try:
        return body.sampling_params(other if limit is None else limit, body.num_top_logprobs)
    except UsageError as error:
        if error.param == "max_tokens" and limit is None:
            raise UsageError(f"max_completion_{error}", param="max_completion_tokens", code=error.code) from None
        raise
