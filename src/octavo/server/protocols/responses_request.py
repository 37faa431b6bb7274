"""The body of `/v1/responses`, and the request that it makes of a model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.errors import UsageError
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.json_schema import check_schema, check_tool_choice, check_tools
from octavo.server.generation.reasoning import effort_arguments
from octavo.server.generation.spec import ChatSpec, NamedTool, ToolChoice, given, read_options
from octavo.server.http.json_body import Int, Number, RequestModel, Text
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.conversation import chat_tool
from octavo.server.protocols.protocol_fields import ByType
from octavo.server.protocols.responses_input import InputItem, to_messages
from octavo.server.protocols.sampling_fields import NullIsAbsent, OptionFields

MAX_ITEMS = 4096
LOGPROBS = "message.output_text.logprobs"

FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "logprobs": "top_logprobs",
    "structured_outputs": "text.format",
    "truncate_prompt_tokens": 'truncation "auto"',
}


class FunctionTool(NullIsAbsent):
    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedToolChoice(RequestModel):
    type: Literal["function"]
    name: Text


class AllowedTool(RequestModel):
    type: Literal["function"]
    name: Text


class AllowedToolsChoice(RequestModel):
    """The model sees only these tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1)


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchemaFormat(RequestModel):
    """strict: the schema is enforced in any case."""

    type: Literal["json_schema"]
    name: Text = Field(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextConfig(RequestModel):
    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, ByType()] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(RequestModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(RequestModel):
    include_obfuscation: bool | None = None


class ResponsesRequest(OptionFields):
    """All other fields are refused by name. Nothing is stored, so every request brings its whole conversation."""

    model: Text | None = None
    input: Annotated[Text | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)], ByType()]
    instructions: Text | None = None
    tools: list[Annotated[FunctionTool, ByType()]] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice, ByType()] | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[Text] | None = None
    metadata: dict[str, Text] | None = Field(default=None, max_length=16)
    truncation: Literal["auto", "disabled"] | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Text | None = None
    conversation: Text | dict[str, Any] | None = None
    max_tool_calls: Int | None = None
    prompt: dict[str, Any] | None = None

    @property
    def chat_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call, in the shape of chat completions."""
        tools = self.tools or []
        if isinstance(self.tool_choice, AllowedToolsChoice):
            allowed = {tool.name for tool in self.tool_choice.tools}
            if missing := sorted(allowed - {tool.name for tool in tools}):
                raise refuse(
                    "tool_choice.tools", f"allows {missing[0]!r}, which is not one of the tools", "invalid_value"
                )
            tools = [tool for tool in tools if tool.name in allowed]
        return [chat_tool(**tool.model_dump(exclude={"type"})) for tool in tools]

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())


def to_chat_spec(body: ResponsesRequest, model: ServedModel, tenant: str) -> ChatSpec:
    """The request to a model. Raises UsageError for what cannot be honoured."""
    _refuse_unsupported(body)
    tools, choice = body.chat_tools, _tool_choice(body)
    check_tools(tools)
    check_tool_choice(choice, tools)
    arguments: dict[str, Any] = {}
    if body.reasoning is not None and body.reasoning.effort is not None:
        arguments = effort_arguments(model.tokenizer.chat_template, body.reasoning.effort, "reasoning.effort")
    return ChatSpec(
        params=SamplingParams(
            **given(body, "temperature", "top_p"),
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
            structured_outputs=_structured(body.text),
        ),
        tenant=tenant,
        options=read_options(body),
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        truncation_side="middle",
        messages=to_messages(body.input, body.instructions),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_arguments=arguments,
    )


def _refuse_unsupported(body: ResponsesRequest) -> None:
    stateless = "responses are not stored here; send the whole conversation as input"
    refused = {
        "store": (body.store, stateless),
        "background": (body.background, "a response is made while its request waits"),
        "previous_response_id": (body.previous_response_id is not None, stateless),
        "conversation": (body.conversation is not None, stateless),
        "prompt": (body.prompt is not None, "there are no stored prompts here"),
        "max_tool_calls": (body.max_tool_calls is not None, "there are no built-in tools here"),
        "service_tier": (body.service_tier not in (None, "auto", "default"), "there is one tier"),
        "text.verbosity": (body.text is not None and body.text.verbosity not in (None, "medium"), "leave it out"),
    }
    if body.reasoning is not None:
        whole = "reasoning comes whole, as reasoning_text; leave it out"
        refused["reasoning.summary"] = (body.reasoning.summary is not None, whole)
        refused["reasoning.generate_summary"] = (body.reasoning.generate_summary is not None, whole)
    if body.stream_options is not None:
        refused["stream_options"] = (not body.stream, "it needs stream: true")
        padded = bool(body.stream_options.include_obfuscation)
        refused["stream_options.include_obfuscation"] = (padded, "events are not padded")
    for param, (is_refused, reason) in refused.items():
        if is_refused:
            raise UsageError(f"{param} is not supported as given: {reason}", param=param, code="unsupported_value")
    for i, name in enumerate(body.include or ()):
        if name != LOGPROBS:
            raise refuse(f"include[{i}]", f"is {name[:64]!r}; only {LOGPROBS!r} can be included")
    for key, value in (body.metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            reason = "has a key of more than 64 or a value of more than 512 characters"
            raise refuse("metadata", reason, "string_above_max_length")


def _tool_choice(body: ResponsesRequest) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        return NamedTool(choice.name)
    if isinstance(choice, AllowedToolsChoice):
        return choice.mode
    return choice if isinstance(choice, str) else "auto"


def _structured(text: TextConfig | None) -> StructuredOutputsParams | None:
    chosen = None if text is None else text.format
    if isinstance(chosen, JsonObjectFormat):
        return StructuredOutputsParams(json_object=True)
    if isinstance(chosen, JsonSchemaFormat):
        check_schema(chosen.schema_, "text.format.schema")
        return StructuredOutputsParams(json=chosen.schema_)
    return None
