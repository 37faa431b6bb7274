"""`POST /v1/chat/completions`: answers to conversations, as OpenAI's and vLLM's clients ask for them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import UsageError
from octavo.sampling_params import MAX_LOGPROBS, BeamSearchParams, SamplingParams
from octavo.server.generation.json_schema import check_tool_choice, check_tools
from octavo.server.generation.naming import constraint_named
from octavo.server.generation.run import start_chat
from octavo.server.generation.spec import ChatSpec, Generation, read_options
from octavo.server.generation.thinking import effort_arguments
from octavo.server.http.json_body import Int, JsonRoute
from octavo.server.http.sse import event
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answer_schemas import CHAT_COMPLETION, streamed_answer
from octavo.server.protocols.answering import AnswerWriter, answer, tenant_of
from octavo.server.protocols.chat_answer import AnswerOptions, ChatWriter
from octavo.server.protocols.chat_messages import (
    MAX_MESSAGES,
    Message,
    NamedToolChoice,
    Tool,
    chat_messages,
    chat_tool_choice,
    chat_tools,
    check_continuation,
    check_template_variables,
)
from octavo.server.protocols.protocol_errors import request_id_of
from octavo.server.protocols.sampling_fields import SamplingFields
from octavo.server.state import state_of

LAST_EVENT = event(b"[DONE]")

router = APIRouter(route_class=JsonRoute, tags=["openai"])


class ChatCompletionRequest(SamplingFields):
    """A conversation and how to go on with it."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


@router.post("/v1/chat/completions", responses=streamed_answer(CHAT_COMPLETION))
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answers a conversation; with `stream` in server-sent events."""
    params = _sampling_params(body)
    _check(body)
    limit, side = body.truncation()
    messages, tools = chat_messages(body.messages), chat_tools(body.tools)
    tool_choice = chat_tool_choice(body.tool_choice, bool(tools))
    check_tools(tools)
    check_tool_choice(tool_choice, tools)

    async def start(model: ServedModel) -> tuple[Generation, AnswerWriter]:
        spec = ChatSpec(
            params=params,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            template_arguments=_template_arguments(body, model),
            options=read_options(body),
            tenant=tenant_of(request),
            truncate_prompt_tokens=limit,
            truncation_side=side,
            max_tokens_may_shrink=body.max_tokens is None and body.max_completion_tokens is None,
        )
        with constraint_named(body.constraint_param):
            generation = await start_chat(state_of(request), model, spec, request_id_of(request))
        return generation, ChatWriter(model, generation, _options(body))

    return await answer(request, body.model, start, stream=bool(body.stream), last=LAST_EVENT)


def _sampling_params(body: ChatCompletionRequest) -> SamplingParams | BeamSearchParams:
    limit, other = body.max_tokens, body.max_completion_tokens
    if limit is not None and other is not None and limit != other:
        message = f"max_tokens is {limit} and max_completion_tokens is {other}; give one of them"
        raise UsageError(message, param="max_tokens", code="invalid_value")
    try:
        return body.sampling_params(other if limit is None else limit, body.num_top_logprobs)
    except UsageError as error:
        if error.param == "max_tokens" and limit is None:
            raise UsageError(f"max_completion_{error}", param="max_completion_tokens", code=error.code) from None
        raise


def _check(body: ChatCompletionRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise UsageError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    if body.prompt_logprobs is not None and body.stream:
        raise UsageError("prompt_logprobs needs stream: false", param="prompt_logprobs", code="invalid_value")
    check_continuation(body.messages, body.continue_final_message, body.add_generation_prompt)
    check_template_variables(body.chat_template_kwargs or {})


def _template_arguments(body: ChatCompletionRequest, model: ServedModel) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        arguments["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        arguments["continue_final_message"] = True
    if body.reasoning_effort is not None:
        arguments |= effort_arguments(model.tokenizer.chat_template, body.reasoning_effort, "reasoning_effort")
    return arguments


def _options(body: ChatCompletionRequest) -> AnswerOptions:
    return AnswerOptions(
        stream=bool(body.stream),
        num_top_logprobs=body.num_top_logprobs,
        includes_usage=body.includes_usage,
        has_running_usage=body.has_running_usage,
        has_token_ids=bool(body.return_token_ids),
        has_timings=bool(body.timings),
        reports_truncation=body.truncate_prompt_tokens is not None,
    )
