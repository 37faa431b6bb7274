"""The bodies of Anthropic's `/v1/messages`, and their conversion to model-independent requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from octavo.config import PdfAs
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.content import (
    Media,
    MessageContent,
    in_a_row,
    joined,
    plain,
    text_of,
)
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import ChatSpec, NamedTool, ToolChoice, given, read_options
from octavo.server.http.json_body import WHOLE, Int, Number, Text
from octavo.server.models.image_reader import ImageSource
from octavo.server.protocols.anthropic.breakpoints import read_breakpoints
from octavo.server.protocols.conversation import Conversation, arguments_text, chat_tools
from octavo.server.protocols.ignored_fields import ANTHROPIC, with_ignored
from octavo.server.protocols.protocol_fields import AnsweredFields, ByType, Historic, NullIsAbsent
from octavo.server.protocols.sealed_text import unseal

MAX_MESSAGES = 4096
MAX_BLOCKS = 4096

FIELD_NAMES = {
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parameters": "input_schema",
}

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The error code at which Claude Code sends the whole conversation and stops using threads."""
_NEUTRAL = SamplingParams()  # for a conversation whose tokens are only counted


class CacheControl(NullIsAbsent):
    """Marks the end of a prompt prefix that stays in the cache longer than usual, for 5 minutes or an hour."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Text | None = None


class Block(Historic):
    cache_control: CacheControl | None = None


class Citations(NullIsAbsent):
    enabled: Literal[False] = False


class TextBlock(Block):
    type: Literal["text"]
    text: Text
    citations: Citations | list[Any] | None = None


class MediaSource(Historic):
    """The source of an image or a document.

    data: base64, or the text of a document
    """

    type: Text | None = None
    media_type: Text | None = None
    data: Text | None = None
    url: Text | None = None
    content: Any = None


class MediaBlock(Block):
    """An image or a document. A document is a text or a PDF file. `EngineConfig` explains `pdf_as`."""

    type: Literal["image", "document"]
    source: MediaSource | None = None
    title: Text | None = None
    context: Text | None = None
    pdf_as: PdfAs | None = None


class ToolUseBlock(Block):
    """An earlier tool call.

    input: an object; anything else is shown to the model as text
    """

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Any


TextContent: TypeAlias = Annotated[
    Text | Annotated[list[Annotated[TextBlock, ByType()]], Field(max_length=MAX_BLOCKS)], ByType()
]


class ToolReferenceBlock(Block):
    """A tool that a search has found. The model sees this tool even if it has `defer_loading`."""

    type: Literal["tool_reference"]
    tool_name: Text


ResultBlock: TypeAlias = TextBlock | MediaBlock | ToolReferenceBlock
ResultBlocks: TypeAlias = Annotated[
    Text | Annotated[list[Annotated[ResultBlock, ByType()]], Field(max_length=MAX_BLOCKS)], ByType()
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: ResultBlocks | None = None
    is_error: bool | None = None


class ThinkingBlock(Historic):
    """Earlier thinking. The chat template decides whether the model sees it again.

    signature: thinking that the server has sealed because it was not to be shown; other servers' signatures are not
    checked
    """

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(Historic):
    """Earlier thinking from another server, which only that server can read. It is left out."""

    type: Literal["redacted_thinking"]
    data: Text


class ServerBlock(Historic):
    """A call or result of a tool that Anthropic's servers ran in an earlier turn. It is left out of the prompt."""

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "fallback",
    ]


OwnBlock: TypeAlias = TextBlock | MediaBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock
AnyBlock: TypeAlias = Annotated[OwnBlock | RedactedThinkingBlock | ServerBlock, ByType()]


class Message(Historic):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Annotated[list[AnyBlock], Field(max_length=MAX_BLOCKS)], ByType()]


class Tool(NullIsAbsent):
    """A tool that the model may call.

    defer_loading: the model sees the tool only once a result refers to it
    eager_input_streaming: has no effect, because arguments are always streamed
    allowed_callers: has no effect, because only the model calls tools
    input_examples: has no effect
    """

    type: Literal["custom"] | None = None
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Text] | None = None
    input_examples: list[dict[str, Any]] | None = None


class ServerTool(Historic):
    """A tool that Anthropic's servers run. Agents offer such tools by default, and the model does not see them."""

    type: Literal[
        "web_search_20250305",
        "web_search_20260209",
        "web_search_20260318",
        "web_fetch_20250910",
        "web_fetch_20260209",
        "web_fetch_20260309",
        "web_fetch_20260318",
        "tool_search_tool_regex",
        "tool_search_tool_regex_20251119",
        "tool_search_tool_bm25",
        "tool_search_tool_bm25_20251119",
        "advisor_20260301",
    ]
    name: Text


class AnyToolChoice(NullIsAbsent):
    """A tool choice without a name: `auto` lets the model decide, `any` forces a call, `none` forbids calls."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class OneToolChoice(NullIsAbsent):
    type: Literal["tool"]
    name: Text
    disable_parallel_tool_use: bool | None = None


class EnabledThinking(NullIsAbsent):
    """Enabled thinking.

    budget_tokens: must be below max_tokens, which limits thinking and answer together; nothing else limits the thinking
    """

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1), WHOLE]
    display: Literal["summarized", "omitted"] | None = None


class OtherThinking(NullIsAbsent):
    """Disabled or adaptive thinking. With `adaptive`, the model decides."""

    type: Literal["disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class Metadata(NullIsAbsent):
    user_id: Text | None = None


class Edit(Historic):
    """An edit of earlier turns that the client wants once the prompt exceeds a given length. This server makes no
    edits: the prompt stays whole.
    """

    type: Text
    keep: Any = None

    @property
    def changes_nothing(self) -> bool:
        """True for an edit that keeps all thinking."""
        return self.type == "clear_thinking_20251015" and self.keep in ("all", {"type": "all"})


class ContextManagement(NullIsAbsent):
    edits: Annotated[list[Edit], Field(max_length=64)] | None = None


class Thread(NullIsAbsent):
    """A request to keep the conversation on the server. This server keeps no conversations.

    `create` is accepted, because the request itself contains the conversation. `continue` is refused with the error
    that makes Claude Code send the whole conversation.
    """

    type: Literal["create", "continue"]
    previous_message_id: Text | None = None


class JsonSchemaFormat(NullIsAbsent):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(NullIsAbsent):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaFormat | None = None
    task_budget: dict[str, Any] | None = None


class CountTokensRequest(with_ignored(NullIsAbsent, ANTHROPIC)):  # type: ignore[misc]
    """The fields that make up a prompt, and fields that have no effect on it."""

    model: Text | None = None
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: TextContent | None = None
    tools: list[Annotated[Tool | ServerTool, ByType()]] | None = None
    tool_choice: Annotated[AnyToolChoice | OneToolChoice, ByType()] | None = None
    thinking: Annotated[EnabledThinking | OtherThinking, ByType()] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    thread: Thread | None = None

    def find_ignored(self) -> list[str]:
        """Return the names of the given fields that have no effect."""
        names = sorted(name for name in self.ignored_fields if getattr(self, name) is not None)
        edits = () if self.context_management is None else self.context_management.edits or ()
        tools = [tool for tool in self.tools or () if isinstance(tool, Tool)]
        found = {
            "context_management.edits": any(not edit.changes_nothing for edit in edits),
            "thread": self.thread is not None,
            "tools.allowed_callers": any(set(tool.allowed_callers or ()) - {"direct"} for tool in tools),
            "tools.input_examples": any(tool.input_examples for tool in tools),
            "tools.defer_loading": self.is_searched and any(tool.defer_loading for tool in tools),
            "output_config.task_budget": self.output_config is not None and self.output_config.task_budget is not None,
        }
        server_tools = {f"tools.{tool.name}" for tool in self.tools or () if isinstance(tool, ServerTool)}
        contents = [message.content for message in self.messages if isinstance(message.content, list)]
        blocks = {
            f"messages.{block.type}" for content in contents for block in content if isinstance(block, ServerBlock)
        }
        given_parts = (name for name, is_given in found.items() if is_given)
        return [*names, *given_parts, *sorted(server_tools), *sorted(blocks)]

    @property
    def is_searched(self) -> bool:
        """True if the request asks the server to search for deferred tools. The server does not search, so the model
        sees all of them.
        """
        return any(isinstance(tool, ServerTool) and tool.type.startswith("tool_search") for tool in self.tools or ())

    def to_spec(self, tenant: str) -> ChatSpec:
        """Return the model-independent request, with default parameters. Raises UsageError for fields that cannot be
        honoured.
        """
        thinking, wanted = self.thinking, self.tool_choice
        choice: ToolChoice = "auto"
        if isinstance(wanted, OneToolChoice):
            choice = NamedTool(wanted.name)
        elif wanted is not None:
            choice = "required" if wanted.type == "any" else wanted.type
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
            for tool in _loaded_tools(self, choice)
        ]
        messages = _chat_messages(self.messages, self.system)
        return ChatSpec(
            params=_NEUTRAL,
            tenant=tenant,
            breakpoints=read_breakpoints(self),
            messages=messages,
            tools=chat_tools(functions, choice),
            tool_choice=choice,
            parallel_tool_calls=not (wanted and wanted.disable_parallel_tool_use),
            template_arguments={"continue_final_message": True} if _continues(messages[-1]) else {},
            thinking=None if thinking is None else thinking.type,
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
        )


class MessagesRequest(CountTokensRequest, AnsweredFields):
    """A request for an answer. Fields that are not listed here are refused by name."""

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
        if self.thread is not None and self.thread.type == "continue":
            reason = "continues a conversation that is not stored here; send all its messages and leave thread out"
            raise refuse("thread", reason, THREAD_UNSUPPORTED)
        if isinstance(self.thinking, EnabledThinking) and self.thinking.budget_tokens >= self.max_tokens:
            reason = "must be below max_tokens, the limit for thinking and answer together"
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


def _loaded_tools(body: CountTokensRequest, choice: ToolChoice) -> list[Tool]:
    """Return the tools that the model sees. Deferred tools are included only if a result refers to them, if they must
    be called, or if the request asks for a search.

    Raises UsageError for a server tool that is the only tool or that must be called.
    """
    own = [tool for tool in body.tools or () if isinstance(tool, Tool)]
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, ServerTool) and (not own or choice == NamedTool(tool.name)):
            raise refuse(
                f"tools[{i}].type",
                f"is {tool.type}, a tool that this server does not have; it is ignored if there are other tools",
            )
    if body.is_searched:
        return own
    loaded = {choice.name} if isinstance(choice, NamedTool) else set()
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                loaded |= {part.tool_name for part in block.content if isinstance(part, ToolReferenceBlock)}
    return [tool for tool in own if not tool.defer_loading or tool.name in loaded]


def _chat_messages(messages: Sequence[Message], system: str | Sequence[TextBlock] | None) -> list[dict[str, Any]]:
    """Convert the conversation to the format of chat completions. Consecutive messages of one role become one turn.

    Raises UsageError if a block does not belong to its role, or if a result belongs to no call.
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
    """Return True if the answer continues the last message. Raises UsageError if it cannot."""
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise refuse("messages", "end with a tool use; send its tool_result too", "invalid_value")
    text = text_of(last["content"])
    if not text or text[-1].isspace():
        raise refuse("messages", "end with an assistant message that is empty or ends in white space", "invalid_value")
    return True


def _content(content: str | Sequence[ResultBlock], where: str) -> MessageContent:
    if isinstance(content, str):
        return plain(content)
    return in_a_row((part for i, block in enumerate(content) for part in _parts(block, f"{where}[{i}]")), "\n")


def _parts(block: ResultBlock, where: str) -> MessageContent:
    if isinstance(block, TextBlock):
        return plain(block.text)
    if isinstance(block, ToolReferenceBlock):
        return plain(f"The tool {block.tool_name} can be called now.")
    return _document(block, where) if block.type == "document" else (_image(block, where),)


def _add_block(conversation: Conversation, role: str, block: AnyBlock, where: str) -> None:
    wanted = {"text": role, **dict.fromkeys(("tool_result", "image", "document"), "user")}.get(block.type, "assistant")
    if role != wanted:
        raise refuse(f"{where}.type", f"belongs in a message of the {wanted}, not of the {role}", "invalid_value")
    if isinstance(block, (TextBlock, MediaBlock)):
        conversation.add(role, _parts(block, where), "\n")
    elif isinstance(block, ToolUseBlock):
        conversation.add_call(block.id, block.name, arguments_text(block.input))
    elif isinstance(block, (RedactedThinkingBlock, ServerBlock)):
        conversation.turn("assistant")
    elif isinstance(block, ThinkingBlock):
        thinking = block.thinking or unseal(block.signature) or ""
        conversation.turn("assistant")["reasoning_content"] = thinking
    else:
        content = _content(block.content or "", f"{where}.content")
        if block.is_error:  # templates have no other way to express it
            content = joined(plain("Error: "), content, "")
        conversation.add_result(block.tool_use_id, content, f"{where}.tool_use_id")


def _image(block: MediaBlock, where: str, kind: Literal["image", "file"] = "image") -> Media:
    source, found = block.source, None
    if source is not None and source.type == "base64" and source.data is not None:
        found = ImageSource(source.data, f"{where}.source.data", is_data=True)
    elif source is not None and source.type == "url" and source.url is not None:
        found = ImageSource(source.url, f"{where}.source.url")
    return Media(kind, f"{where}.type", found, block.pdf_as)


def _document(block: MediaBlock, where: str) -> MessageContent:
    """Return a text or PDF document, preceded by its title and the client's description of it."""
    source, texts = block.source, [text for text in (block.title, block.context) if text]
    if source is not None and source.type == "text" and source.data is not None:
        return plain("\n".join(filter(None, (*texts, source.data))))
    return (*(plain("\n".join(texts)) if texts else ()), _image(block, where, "file"))
