"""The bodies of Anthropic's `/v1/messages`, and the request that a body makes of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.content import (
    Media,
    MessageContent,
    MessagePart,
    PlainText,
    in_a_row,
    joined,
    plain,
    text_of,
)
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import ChatSpec, NamedTool, ToolChoice, given, read_options
from octavo.server.http.json_body import WHOLE, Int, Number, Text
from octavo.server.protocols.conversation import Conversation, arguments_text, chat_tools
from octavo.server.protocols.protocol_fields import AnsweredFields, ByType, Historic, NullIsAbsent

MAX_MESSAGES = 4096
MAX_BLOCKS = 4096

FIELD_NAMES = {
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parameters": "input_schema",
}

_NEUTRAL = SamplingParams()  # of a conversation that is only counted


class CacheControl(NullIsAbsent):
    """A hint with no effect: the common beginning of prompts is always cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Historic):
    cache_control: CacheControl | None = None


class Citations(NullIsAbsent):
    enabled: Literal[False] = False


class TextBlock(Block):
    type: Literal["text"]
    text: Text
    citations: Citations | list[Any] | None = None


class MediaBlock(Block):
    """An image or a document, which no model here reads."""

    type: Literal["image", "document"]


class ToolUseBlock(Block):
    """input: an object. Anything else is shown to the model as text."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Any


TextContent: TypeAlias = Annotated[
    Text | Annotated[list[Annotated[TextBlock, ByType()]], Field(max_length=MAX_BLOCKS)], ByType()
]
ResultBlocks: TypeAlias = Annotated[
    Text | Annotated[list[Annotated[TextBlock | MediaBlock, ByType()]], Field(max_length=MAX_BLOCKS)], ByType()
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: ResultBlocks | None = None
    is_error: bool | None = None


class ThinkingBlock(Historic):
    """Earlier thinking. The chat template decides if the model sees it again. The signature is not checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


AnyBlock: TypeAlias = Annotated[TextBlock | MediaBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, ByType()]


class Message(Historic):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Annotated[list[AnyBlock], Field(max_length=MAX_BLOCKS)], ByType()]


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
    budget_tokens: Annotated[int, Field(ge=1), WHOLE]
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

    def to_spec(self, tenant: str) -> ChatSpec:
        """The request to a model, with the default parameters. Raises UsageError for what cannot be honoured."""
        thinking, wanted = self.thinking, self.tool_choice
        if thinking is not None and thinking.display == "omitted":
            raise refuse("thinking.display", "is omitted, but thinking is always shown; leave it out")
        choice: ToolChoice = "auto"
        if isinstance(wanted, OneToolChoice):
            choice = NamedTool(wanted.name)
        elif wanted is not None:
            choice = "required" if wanted.type == "any" else wanted.type
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
            for tool in self.tools or ()
        ]
        messages = _chat_messages(self.messages, self.system)
        return ChatSpec(
            params=_NEUTRAL,
            tenant=tenant,
            messages=messages,
            tools=chat_tools(functions, choice),
            tool_choice=choice,
            parallel_tool_calls=not (wanted and wanted.disable_parallel_tool_use),
            template_arguments={"continue_final_message": True} if _continues(messages[-1]) else {},
            thinking=None if thinking is None else thinking.type,
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
        )


class MessagesRequest(CountTokensRequest, AnsweredFields):
    """All other fields are refused by name."""

    max_tokens: Int
    stop_sequences: list[Text] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def own_names(self) -> Mapping[str, str]:
        return FIELD_NAMES

    def to_spec(self, tenant: str) -> ChatSpec:
        if isinstance(self.thinking, EnabledThinking) and self.thinking.budget_tokens >= self.max_tokens:
            reason = "must be below max_tokens, which bounds thinking and answer together"
            raise refuse("thinking.budget_tokens", reason, "integer_above_max_value")
        structured = None
        if self.output_config is not None and (chosen := self.output_config.format) is not None:
            check_schema(chosen.schema_, "output_config.format.schema")
            structured = StructuredOutputsParams(json=chosen.schema_)
        named = given(self, "max_tokens", "temperature", "top_p", "top_k")
        params = SamplingParams(
            **named,
            stop=self.stop_sequences or (),
            structured_outputs=structured,
        )
        return replace(super().to_spec(tenant), params=params, given=frozenset(named), options=read_options(self))


def _chat_messages(messages: Sequence[Message], system: str | Sequence[TextBlock] | None) -> list[dict[str, Any]]:
    """The conversation in the shape of chat completions. Messages of one role in a row become one turn.

    Raises UsageError if a block does not belong to its role, or a result to no call.
    """
    conversation = Conversation()
    if system:
        conversation.add("system", _content(system, "system"), "\n")
    for i, message in enumerate(messages):
        if isinstance(message.content, str):
            conversation.add(message.role, plain(message.content), "\n")
            continue
        if message.role == "assistant":  # an answer may have been empty
            conversation.turn("assistant")
        elif not message.content:
            raise refuse(f"messages[{i}].content", "is an empty list", "empty_array")
        for j, block in enumerate(message.content):
            _add_block(conversation, message.role, block, f"messages[{i}].content[{j}]")
    return conversation.messages


def _continues(last: dict[str, Any]) -> bool:
    """True if the answer continues the last message. Raises UsageError if it cannot."""
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise refuse("messages", "end with a tool use; send its tool_result too", "invalid_value")
    text = text_of(last["content"])
    if not text or text[-1].isspace():
        raise refuse("messages", "end with an assistant message that is empty or ends in white space", "invalid_value")
    return True


def _content(content: str | Sequence[TextBlock | MediaBlock], where: str) -> MessageContent:
    if isinstance(content, str):
        return plain(content)
    return in_a_row((_part(block, f"{where}[{i}]") for i, block in enumerate(content)), "\n")


def _part(block: TextBlock | MediaBlock, where: str) -> MessagePart:
    if isinstance(block, TextBlock):
        return PlainText(block.text)
    return Media("image" if block.type == "image" else "file", f"{where}.type")


def _add_block(conversation: Conversation, role: str, block: AnyBlock, where: str) -> None:
    wanted = {"text": role, **dict.fromkeys(("tool_result", "image", "document"), "user")}.get(block.type, "assistant")
    if role != wanted:
        raise refuse(f"{where}.type", f"belongs in a message of the {wanted}, not of the {role}", "invalid_value")
    if isinstance(block, (TextBlock, MediaBlock)):
        conversation.add(role, (_part(block, where),), "\n")
    elif isinstance(block, ToolUseBlock):
        conversation.add_call(block.id, block.name, arguments_text(block.input))
    elif isinstance(block, ThinkingBlock):
        conversation.turn("assistant")["reasoning_content"] = block.thinking
    else:
        content = _content(block.content or "", f"{where}.content")
        if block.is_error:  # templates have no other way to express it
            content = joined(plain("Error: "), content, "")
        conversation.add_result(block.tool_use_id, content, f"{where}.tool_use_id")
