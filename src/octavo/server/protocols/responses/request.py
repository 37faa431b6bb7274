"""The bodies of OpenAI's `/v1/responses`, and their conversion to model-independent requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field, PrivateAttr

from octavo.config import PdfAs
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.content import Media, MediaKind, MessageContent, MessagePart, PlainText, of_file, plain
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import ChatSpec, given, read_options
from octavo.server.http.json_body import Int, Number, RequestModel, Text
from octavo.server.models.image_reader import ImageSource, names_media
from octavo.server.protocols.cache_breakpoints import PromptCacheBreakpoint, PromptCacheOptions, openai_breakpoints
from octavo.server.protocols.conversation import Conversation, chat_tools
from octavo.server.protocols.ignored_fields import RESPONSES, with_ignored
from octavo.server.protocols.protocol_fields import AnsweredFields, ByType, Historic, NumLogprobs
from octavo.server.protocols.responses.tools import (
    AnyTool,
    AnyToolChoice,
    allowed_functions,
    custom_arguments,
    ignored_parts,
    tool_choice_of,
    wire_name,
)
from octavo.server.protocols.sealed_text import unseal

MAX_ITEMS = 4096
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# Values of `include` about items that never occur.
_OF_HOSTED_TOOLS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
    "structured_outputs": "text.format",
    "truncate_prompt_tokens": 'truncation "auto"',
}

F = TypeVar("F", bound="ItemFields")

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class TextPart(Historic):
    """A text from the user, or from an answer that is sent back."""

    type: Literal["input_text", "output_text"]
    text: Text
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class RefusalPart(Historic):
    type: Literal["refusal"]
    refusal: Text


class MediaPart(Historic):
    """An image or a file. No model here reads audio. `EngineConfig` explains `pdf_as`."""

    type: Literal["input_image", "input_file", "input_audio"]
    image_url: Text | None = None
    detail: Literal["low", "high", "auto"] | None = None
    file_data: Text | None = None
    file_url: Text | None = None
    file_id: Text | None = None
    filename: Text | None = None
    pdf_as: PdfAs | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


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
    namespace: Text | None = None


class CustomCallItem(Item):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: Text
    namespace: Text | None = None


class CallOutputItem(Item):
    """The result of calling a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: ItemContent


class ReasoningText(Historic):
    type: Literal["reasoning_text", "text"]
    text: Text


class SummaryText(Historic):
    type: Literal["summary_text"]
    text: Text


class ReasoningItem(Item):
    """The reasoning before the next answer. The chat template decides whether the model sees it again.

    encrypted_content: its text as sealed by an Octavo server; text sealed by another product is left out
    """

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Text | None = None

    @property
    def text(self) -> str:
        """The reasoning, or an empty string if it cannot be read."""
        if not self.content and (sealed := unseal(self.encrypted_content)) is not None:
            return sealed
        return "\n".join(part.text for part in self.content or self.summary or ())

    @property
    def is_lost(self) -> bool:
        """True if the reasoning cannot be read."""
        return self.encrypted_content is not None and not self.content and unseal(self.encrypted_content) is None


class CompactionItem(Item):
    """A summary that replaces the items of a conversation."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: Text


class HostedItem(Item):
    """An action of a tool that OpenAI's servers ran in an earlier turn, or a note kept by a client. It is left out."""

    type: Literal[
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "tool_search_call",
        "tool_search_output",
        "mcp_list_tools",
        "ghost_snapshot",
    ]


CallItem: TypeAlias = FunctionCallItem | CustomCallItem
InputItem: TypeAlias = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem | CompactionItem | HostedItem, ByType()
]


class PlainFormat(RequestModel):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(RequestModel):
    """An answer format given by a JSON schema.

    strict: has no effect, because the schema is always enforced
    """

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
    context: Text | None = None
    mode: Text | None = None


class StreamOptions(RequestModel):
    include_obfuscation: bool | None = None


class ItemFields(AnsweredFields):
    """The fields of a conversation made of items."""

    # The items of the response that this request continues. They precede the request's own items.
    _history: Sequence[InputItem] = PrivateAttr(default=())

    input: Annotated[Text | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)], ByType()]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None

    @property
    def own_names(self) -> Mapping[str, str]:
        return FIELD_NAMES

    def find_ignored(self) -> list[str]:
        items = self.input if isinstance(self.input, list) else ()
        parts = {
            "service_tier": self.service_tier not in (None, "auto", "default", "flex"),
            "input.encrypted_content": any(isinstance(item, ReasoningItem) and item.is_lost for item in items),
        }
        hosted = sorted({f"input.{item.type}" for item in items if isinstance(item, HostedItem)})
        return [*super().find_ignored(), *(name for name, is_given in parts.items() if is_given), *hosted]

    def continuing(self: F, history: Sequence[InputItem]) -> F:
        """Return the same request, preceded by these items."""
        if isinstance(self.input, list) and len(self.input) + len(history) > MAX_ITEMS:
            reason = f"has {len(history)} items before it; together, at most {MAX_ITEMS:,} are allowed"
            raise refuse("input", reason, "array_above_max_length")
        continued: F = self.model_copy()
        continued._history = history
        return continued

    @property
    def all_items(self) -> list[InputItem]:
        """The items of earlier requests, followed by this request's own items."""
        own = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return [*self._history, *own]

    def chat_messages(self) -> list[dict[str, Any]]:
        """Convert the conversation to the format of chat completions. Raises UsageError for items that cannot be
        honoured.
        """
        messages = _chat_messages(self.all_items, self.instructions, len(self._history))
        if not messages:
            raise refuse("input", "contains no item that the model can read", "invalid_value")
        return messages


class ResponsesRequest(with_ignored(ItemFields, RESPONSES)):  # type: ignore[misc]
    """A request for a response. Fields that are not listed here are refused by name."""

    tools: list[AnyTool] | None = None
    tool_choice: AnyToolChoice | None = None
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
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Text | dict[str, Any] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    max_tool_calls: Int | None = None
    prompt: dict[str, Any] | None = None

    def find_ignored(self) -> list[str]:
        reasoning = self.reasoning or Reasoning()
        parts = {
            "text.verbosity": self.text is not None and self.text.verbosity not in (None, "medium"),
            **{
                f"reasoning.{name}": getattr(reasoning, name) is not None
                for name in ("summary", "generate_summary", "context", "mode")
            },
            "include": any(name in _OF_HOSTED_TOOLS for name in self.include or ()),
        }
        given_parts = (name for name, is_given in parts.items() if is_given)
        return [*super().find_ignored(), *given_parts, *ignored_parts(self.tools)]

    @property
    def is_stored(self) -> bool:
        """True if the client may refer to the response later, which is OpenAI's default."""
        return self.store is not False

    def to_spec(self, tenant: str) -> ChatSpec:
        _refuse_unsupported(self)
        choice = tool_choice_of(self.tool_choice)
        tools = chat_tools(allowed_functions(self.tools, self.tool_choice), choice)
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
            breakpoints=openai_breakpoints(self.prompt_cache_options, self.prompt_cache_retention, _marked_texts(self)),
            options=read_options(self),
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            truncation_side="turns",
            messages=self.chat_messages(),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )


def _marked_texts(body: ItemFields) -> Iterator[tuple[str, PromptCacheBreakpoint | None]]:
    """Yield the texts of instructions and items in order, each with its mark."""
    yield body.instructions or "", None
    for item in body.all_items:
        content = getattr(item, "output" if isinstance(item, CallOutputItem) else "content", None)
        if isinstance(content, list) and not isinstance(item, ReasoningItem):
            yield from ((getattr(part, "text", ""), getattr(part, "prompt_cache_breakpoint", None)) for part in content)
        else:
            yield content if isinstance(content, str) else "", None


def _refuse_unsupported(body: ResponsesRequest) -> None:
    options = body.stream_options or StreamOptions()
    for param, is_refused, reason in (
        ("background", body.background and not body.is_stored, "it needs store: true, to be fetched later"),
        ("conversation", body.conversation is not None, "there are none here; use previous_response_id"),
        ("prompt", body.prompt is not None, "there are no stored prompts here"),
        ("max_tool_calls", body.max_tool_calls is not None, "there are no built-in tools here"),
        ("stream_options", body.stream_options is not None and not body.stream, "it needs stream: true"),
        ("stream_options.include_obfuscation", options.include_obfuscation, "events are not padded"),
    ):
        if is_refused:
            raise refuse(param, f"is not supported as given: {reason}")
    for i, name in enumerate(body.include or ()):
        if name not in (LOGPROBS, ENCRYPTED_REASONING, *_OF_HOSTED_TOOLS):
            known = f"only {LOGPROBS!r} and {ENCRYPTED_REASONING!r} can be included"
            raise refuse(f"include[{i}]", f"is {name[:64]!r}; {known}")
    for key, value in (body.metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            reason = "has a key of more than 64 or a value of more than 512 characters"
            raise refuse("metadata", reason, "string_above_max_length")


def _structured(text: TextConfig | None) -> StructuredOutputsParams | None:
    chosen = None if text is None else text.format
    if isinstance(chosen, JsonSchemaFormat):
        check_schema(chosen.schema_, "text.format.schema")
        return StructuredOutputsParams(json=chosen.schema_)
    return StructuredOutputsParams(json_object=True) if chosen is not None and chosen.type == "json_object" else None


def _chat_messages(items: Sequence[InputItem], instructions: str | None, num_before: int) -> list[dict[str, Any]]:
    """Convert the conversation to the format of chat completions.

    num_before: number of items from earlier requests

    Consecutive reasoning, text and calls become one assistant message. Consecutive system and developer messages become
    one system message, because templates support only one.
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
            if item.text:
                conversation.turn("assistant")["reasoning_content"] = item.text
        elif isinstance(item, FunctionCallItem):
            conversation.add_call(item.call_id, wire_name(item.name, item.namespace), item.arguments)
        elif isinstance(item, CustomCallItem):
            name = wire_name(item.name, item.namespace)
            conversation.add_call(item.call_id, name, custom_arguments(item.input))
        elif isinstance(item, CompactionItem):
            if (summary := unseal(item.encrypted_content)) is None:
                reason = "was made by another server and cannot be read here; compact the conversation again"
                raise refuse(f"input[{i}].encrypted_content", reason)
            conversation.add("assistant", plain(summary), "\n\n")
        elif isinstance(item, CallOutputItem):
            conversation.add_result(item.call_id, _content(item.output, f"input[{i}].output"), f"input[{i}].call_id")
    return conversation.messages


def _content(content: str | Sequence[AnyPart], where: str) -> MessageContent:
    if isinstance(content, str):
        return plain(content)
    return tuple(_part(part, f"{where}[{i}].type") for i, part in enumerate(content))


def _part(part: AnyPart, where: str) -> MessagePart:
    if isinstance(part, MediaPart):
        return replace(_media(part, where), pdf_as=part.pdf_as)
    return PlainText(part.text if isinstance(part, TextPart) else part.refusal)


def _media(part: MediaPart, where: str) -> Media:
    """Return the part as media.

    where: path of the part's type in the request
    """
    name = where.removesuffix(".type")
    if part.type == "input_image" and part.image_url is not None:
        return Media("image", where, ImageSource(part.image_url, f"{name}.image_url", detail=part.detail or "auto"))
    if part.type == "input_file" and part.file_url is not None and names_media(part.file_url.partition("?")[0]):
        return Media("file", where, ImageSource(part.file_url, f"{name}.file_url"))
    if part.type == "input_file":
        return of_file(part.file_data, part.filename, where, f"{name}.file_data")
    return Media(_MEDIA[part.type], where)
