"""The body of Anthropic's `/v1/messages`, and the request that it makes of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.json_schema import check_schema, check_tool_choice, check_tools
from octavo.server.generation.reasoning import effort_arguments, switch_arguments
from octavo.server.generation.spec import ChatSpec, NamedTool, ToolChoice, given, read_options
from octavo.server.http.json_body import Int, Number, Text
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.conversation import chat_tool
from octavo.server.protocols.messages_input import CacheControl, Message, TextContent, continues, to_messages
from octavo.server.protocols.protocol_fields import ByType
from octavo.server.protocols.sampling_fields import NullIsAbsent, OptionFields

MAX_MESSAGES = 4096
MIN_THINKING_BUDGET = 1

FIELD_NAMES = {"stop": "stop_sequences", "structured_outputs": "output_config.format", "parameters": "input_schema"}


class Tool(NullIsAbsent):
    """eager_input_streaming: has no effect, because arguments are always streamed."""

    type: Literal["custom"] | None = None
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None


class AnyToolChoice(NullIsAbsent):
    """auto: the model decides; any: it must call one; none: it must not."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class OneToolChoice(NullIsAbsent):
    type: Literal["tool"]
    name: Text
    disable_parallel_tool_use: bool | None = None


class EnabledThinking(NullIsAbsent):
    """budget_tokens: below max_tokens, which bounds thinking and answer together; nothing else bounds the thinking."""

    type: Literal["enabled"]
    budget_tokens: Int = Field(ge=MIN_THINKING_BUDGET)
    display: Literal["summarized", "omitted"] | None = None


class OtherThinking(NullIsAbsent):
    """adaptive: the model decides."""

    type: Literal["disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class Metadata(NullIsAbsent):
    user_id: Text | None = None


class JsonSchemaFormat(NullIsAbsent):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(NullIsAbsent):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaFormat | None = None


class CountTokensRequest(NullIsAbsent):
    """The fields that make up a prompt."""

    model: Text | None = None
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: TextContent | None = None
    tools: list[Annotated[Tool, ByType()]] | None = None
    tool_choice: Annotated[AnyToolChoice | OneToolChoice, ByType()] | None = None
    thinking: Annotated[EnabledThinking | OtherThinking, ByType()] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest, OptionFields):
    """All other fields are refused by name."""

    max_tokens: Int
    stop_sequences: list[Text] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stream: bool | None = None


def to_chat_spec(body: MessagesRequest, model: ServedModel, tenant: str) -> ChatSpec:
    """The request to a model. Raises UsageError for what cannot be honoured."""
    thinking = body.thinking
    if isinstance(thinking, EnabledThinking) and thinking.budget_tokens >= body.max_tokens:
        reason = "must be below max_tokens, which bounds thinking and answer together"
        raise refuse("thinking.budget_tokens", reason, "integer_above_max_value")
    params = SamplingParams(
        **given(body, "max_tokens", "temperature", "top_p", "top_k"),
        stop=body.stop_sequences or (),
        structured_outputs=_structured(body.output_config),
    )
    return replace(prompt_spec(body, model, tenant, params), options=read_options(body))


def prompt_spec(body: CountTokensRequest, model: ServedModel, tenant: str, params: SamplingParams) -> ChatSpec:
    """The same for the fields that make up the prompt, with these parameters."""
    tools = [
        chat_tool(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
        for tool in body.tools or ()
    ]
    check_tools(tools)
    choice = _tool_choice(body)
    check_tool_choice(choice, tools)
    messages = to_messages(body.messages, body.system)
    arguments = _thinking_arguments(body, model)
    if continues(messages):
        arguments = {**arguments, "continue_final_message": True}
    return ChatSpec(
        params=params,
        tenant=tenant,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not getattr(body.tool_choice, "disable_parallel_tool_use", None),
        template_arguments=arguments,
        offers_truncation=False,
        max_tokens_may_shrink=True,  # the protocol has a stop_reason for this, and clients ask for more than they need
    )


def _tool_choice(body: CountTokensRequest) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, OneToolChoice):
        return NamedTool(choice.name)
    if isinstance(choice, AnyToolChoice):
        return "required" if choice.type == "any" else "none" if choice.type == "none" else "auto"
    return "auto"


def _thinking_arguments(body: CountTokensRequest, model: ServedModel) -> dict[str, Any]:
    template = model.tokenizer.chat_template
    thinking = body.thinking
    if thinking is not None and thinking.display == "omitted":
        raise refuse("thinking.display", "is omitted, but thinking is always shown; leave it out")
    if isinstance(thinking, OtherThinking) and thinking.type == "adaptive":
        arguments = {}
    else:
        wanted = None if thinking is None else thinking.type == "enabled"
        arguments = switch_arguments(template, wanted, "thinking.type")
    effort = None if body.output_config is None else body.output_config.effort
    return arguments if effort is None else arguments | effort_arguments(template, effort, "output_config.effort")


def _structured(config: OutputConfig | None) -> StructuredOutputsParams | None:
    if config is None or config.format is None:
        return None
    check_schema(config.format.schema_, "output_config.format.schema")
    return StructuredOutputsParams(json=config.format.schema_)
