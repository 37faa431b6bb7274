"""The bodies of OpenAI's `/v1/responses`, and the request that a body makes of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PrivateAttr

from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.content import Media, MediaKind, MessageContent, MessagePart, PlainText, plain
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import ChatSpec, NamedTool, ToolChoice, given, read_options
from octavo.server.http.json_body import Int, Number, RequestModel, Text
from octavo.server.protocols.conversation import Conversation, chat_tools
from octavo.server.protocols.ignored_fields import RESPONSES, with_ignored
from octavo.server.protocols.protocol_fields import AnsweredFields, ByType, Historic, NullIsAbsent, NumLogprobs

MAX_ITEMS = 4096
LOGPROBS = "message.output_text.logprobs"

FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
    "structured_outputs": "text.format",
    "truncate_prompt_tokens": 'truncation "auto"',
}

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class TextPart(Historic):
    """A text of the user, or of an answer that is sent back."""

    type: Literal["input_text", "output_text"]
    text: Text


class RefusalPart(Historic):
    type: Literal["refusal"]
    refusal: Text


class MediaPart(Historic):
    """An image, a file or audio, which no model here reads."""

    type: Literal["input_image", "input_file", "input_audio"]


AnyPart: TypeAlias = TextPart | RefusalPart | MediaPart
ItemContent: TypeAlias = Annotated[
    Text | Annotated[list[Annotated[AnyPart, ByType()]], Field(min_length=1, max_length=1024)], ByType()
]
_MEDIA: dict[str, MediaKind] = {"input_image": "image", "input_file": "file", "input_audio": "audio"}


class Item(Historic):
    id: Text | None = None
    status: Status | None = None


class MessageItem(Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: ItemContent


class ReasoningText(Historic):
    type: Literal["reasoning_text"]
    text: Text


class SummaryText(Historic):
    type: Literal["summary_text"]
    text: Text


class ReasoningItem(Item):
    """The reasoning before the next answer. The chat template decides if the model sees it again."""

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Text | None = None


InputItem: TypeAlias = Annotated[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, ByType()]


class FunctionTool(NullIsAbsent):
    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedToolChoice(RequestModel):
    """A function, as the one that must be called or one of those that may be."""

    type: Literal["function"]
    name: Text


class AllowedToolsChoice(RequestModel):
    """The model sees only these tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1)


class PlainFormat(RequestModel):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(RequestModel):
    """strict: the schema is enforced in any case."""

    type: Literal["json_schema"]
    name: Text = Field(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextConfig(RequestModel):
    format: Annotated[PlainFormat | JsonSchemaFormat, ByType()] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(RequestModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(RequestModel):
    include_obfuscation: bool | None = None


class ResponsesRequest(with_ignored(AnsweredFields, RESPONSES)):  # type: ignore[misc]
    """All other fields are refused by name."""

    # The items of the response that this one continues, which come before the request's own.
    _history: Sequence[InputItem] = PrivateAttr(default=())

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
    top_k: Int | None = None
    top_logprobs: NumLogprobs | None = None
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
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    max_tool_calls: Int | None = None
    prompt: dict[str, Any] | None = None

    @property
    def own_names(self) -> Mapping[str, str]:
        return FIELD_NAMES

    def find_ignored(self) -> list[str]:
        has_verbosity = self.text is not None and self.text.verbosity not in (None, "medium")
        return [*super().find_ignored(), *(["text.verbosity"] if has_verbosity else [])]

    def continuing(self, history: Sequence[InputItem]) -> ResponsesRequest:
        """The same request after these items."""
        if isinstance(self.input, list) and len(self.input) + len(history) > MAX_ITEMS:
            reason = f"has {len(history)} items before it; together, at most {MAX_ITEMS:,} are allowed"
            raise refuse("input", reason, "array_above_max_length")
        continued: ResponsesRequest = self.model_copy()
        continued._history = history
        return continued

    @property
    def all_items(self) -> list[InputItem]:
        """The items before this request, and its own."""
        own = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return [*self._history, *own]

    @property
    def is_stored(self) -> bool:
        """True if the client may come back to the response, which is OpenAI's default."""
        return self.store is not False

    def to_spec(self, tenant: str) -> ChatSpec:
        _refuse_unsupported(self)
        choice = _tool_choice(self)
        tools = chat_tools([tool.model_dump(exclude={"type"}) for tool in _allowed_tools(self)], choice)
        named = given(self, "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
        wants_logprobs = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return ChatSpec(
            params=SamplingParams(
                **named,
                max_tokens=None if self.max_output_tokens == -1 else self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
                structured_outputs=_structured(self.text),
            ),
            given=frozenset(named),
            tenant=tenant,
            options=read_options(self),
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            truncation_side="turns",
            messages=_chat_messages(self.all_items, self.instructions, len(self._history)),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )


def _refuse_unsupported(body: ResponsesRequest) -> None:
    whole = "reasoning comes whole, as reasoning_text; leave it out"
    reasoning, options = body.reasoning or Reasoning(), body.stream_options or StreamOptions()
    for param, is_refused, reason in (
        ("background", body.background and not body.is_stored, "it needs store: true, to be fetched later"),
        ("conversation", body.conversation is not None, "there are none here; use previous_response_id"),
        ("prompt", body.prompt is not None, "there are no stored prompts here"),
        ("max_tool_calls", body.max_tool_calls is not None, "there are no built-in tools here"),
        ("service_tier", body.service_tier not in (None, "auto", "default"), "there is one tier"),
        ("reasoning.summary", reasoning.summary is not None, whole),
        ("reasoning.generate_summary", reasoning.generate_summary is not None, whole),
        ("stream_options", body.stream_options is not None and not body.stream, "it needs stream: true"),
        ("stream_options.include_obfuscation", options.include_obfuscation, "events are not padded"),
    ):
        if is_refused:
            raise refuse(param, f"is not supported as given: {reason}")
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
    return choice or "auto"


def _allowed_tools(body: ResponsesRequest) -> Sequence[FunctionTool]:
    tools = body.tools or ()
    if not isinstance(body.tool_choice, AllowedToolsChoice):
        return tools
    allowed = {tool.name for tool in body.tool_choice.tools}
    if missing := sorted(allowed - {tool.name for tool in tools}):
        raise refuse("tool_choice.tools", f"allows {missing[0]!r}, which is not one of the tools", "invalid_value")
    return [tool for tool in tools if tool.name in allowed]


def _structured(text: TextConfig | None) -> StructuredOutputsParams | None:
    chosen = None if text is None else text.format
    if isinstance(chosen, JsonSchemaFormat):
        check_schema(chosen.schema_, "text.format.schema")
        return StructuredOutputsParams(json=chosen.schema_)
    return StructuredOutputsParams(json_object=True) if chosen is not None and chosen.type == "json_object" else None


def _chat_messages(items: Sequence[InputItem], instructions: str | None, num_before: int) -> list[dict[str, Any]]:
    """The conversation in the shape of chat completions. num_before: items of earlier requests.

    Reasoning, text and calls in a row are one message of the assistant. System and developer messages in a row are one
    system message, because templates support only one.
    """
    conversation = Conversation()
    if instructions:
        conversation.add("system", plain(instructions), "\n\n")
    for i, item in enumerate(items, -num_before):
        if isinstance(item, MessageItem):
            content = _content(item.content, f"input[{i}].content")
            if item.role == "user":
                conversation.messages.append({"role": "user", "content": content})
            elif item.role == "assistant":
                conversation.add("assistant", content, "")
            else:
                conversation.add("system", content, "\n\n")
        elif isinstance(item, ReasoningItem):
            if item.encrypted_content:
                raise refuse(f"input[{i}].encrypted_content", "cannot be read here; send the reasoning as content")
            texts = [part.text for part in item.content or item.summary or ()]
            conversation.turn("assistant")["reasoning_content"] = "\n".join(texts)
        elif isinstance(item, FunctionCallItem):
            conversation.add_call(item.call_id, item.name, item.arguments)
        else:
            conversation.add_result(item.call_id, _content(item.output, f"input[{i}].output"), f"input[{i}].call_id")
    return conversation.messages


def _content(content: str | Sequence[AnyPart], where: str) -> MessageContent:
    if isinstance(content, str):
        return plain(content)
    return tuple(_part(part, f"{where}[{i}].type") for i, part in enumerate(content))


def _part(part: AnyPart, where: str) -> MessagePart:
    if isinstance(part, MediaPart):
        return Media(_MEDIA[part.type], where)
    return PlainText(part.text if isinstance(part, TextPart) else part.refusal)
