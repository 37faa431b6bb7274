"""The body of `/v1/chat/completions` with its messages and tools, and its conversion to a model-independent request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from octavo.config import PdfAs
from octavo.engine.texts.prompt_encoder import OWN_VARIABLES
from octavo.errors import UsageError
from octavo.server.errors import refuse
from octavo.server.generation.content import (
    Media,
    MediaKind,
    MessageContent,
    MessagePart,
    PlainText,
    in_a_row,
    of_file,
    plain,
)
from octavo.server.generation.spec import ChatSpec, NamedTool, ToolChoice, given, read_options
from octavo.server.http.json_body import Int, Text, quote
from octavo.server.models.image_reader import ImageSource
from octavo.server.protocols.cache_breakpoints import PromptCacheBreakpoint, openai_breakpoints
from octavo.server.protocols.conversation import chat_call, chat_tools
from octavo.server.protocols.ignored_fields import CHAT, with_ignored
from octavo.server.protocols.protocol_fields import ByType, Historic, NullIsAbsent, NumLogprobs
from octavo.server.protocols.sampling_fields import SamplingFields

MAX_MESSAGES = 4096
# Fields of a message that only one role may have.
_OF_ROLE = {
    **dict.fromkeys(("tool_calls", "refusal", "reasoning_content", "reasoning"), "assistant"),
    "tool_call_id": "tool",
}
# Types of parts other than text, as sent by OpenAI's, vLLM's and llama.cpp's clients.
_MEDIA: dict[str, MediaKind] = {
    **dict.fromkeys(("image_url", "image", "image_embeds"), "image"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "video"),
    "file": "file",
}


Detail: TypeAlias = Literal["low", "high", "auto"]


class ImageUrl(Historic):
    url: Text
    detail: Detail | None = None


class FileData(Historic):
    """A file from the user.

    file_data: a data: URL, or base64 alone
    file_id: id of a stored file; no model here reads stored files
    """

    file_data: Text | None = None
    filename: Text | None = None
    file_id: Text | None = None


class VideoData(Historic):
    """A video from the user, given as `data` or `url`.

    data: base64
    url: its address
    format: file format; ignored, because the content shows it
    """

    data: Text | None = None
    url: Text | None = None
    format: Text | None = None


class ContentPart(Historic):
    """A part of the content: text, an image, or a part that no model here reads. The error about such a part names its
    type.

    image_url: as sent by OpenAI's clients, an object or a plain string
    image, url: as sent by other clients
    uuid: other clients' name for the image; it is not needed, because the request contains the image
    video_url: as sent by vLLM's clients
    input_video: as sent by llama.cpp's clients
    pdf_as: see `EngineConfig`
    """

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageUrl | Text | None = None
    video_url: ImageUrl | Text | None = None
    input_video: VideoData | None = None
    image: Text | None = None
    url: Text | None = None
    detail: Detail | None = None
    uuid: Text | None = None
    file: FileData | None = None
    pdf_as: PdfAs | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class CalledFunction(Historic):
    """The function of an earlier call.

    arguments: JSON text; anything else, such as arguments that were cut off, is shown to the model unchanged
    """

    name: Text
    arguments: Text


class CalledTool(Historic):
    """An earlier tool call by the model."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Historic):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None
    name: Text | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: Text | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None


class FunctionTool(NullIsAbsent):
    """A function that the model may call.

    strict: the arguments must follow the schema, as they always do if a tool must be called
    """

    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(NullIsAbsent):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


Tools: TypeAlias = list[Annotated[Tool, ByType()]]


class NamedFunction(NullIsAbsent):
    """The function that must be called."""

    name: Text


class NamedToolChoice(NullIsAbsent):
    """A `tool_choice` that names a tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class TemplateFields(NullIsAbsent):
    """Fields of requests that control how the chat template renders the conversation."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def template_arguments(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return the arguments for the template. Raises UsageError for arguments that the server itself sets, and for a
        conversation that cannot be continued.
        """
        arguments = dict(self.chat_template_kwargs or {})
        if wrong := sorted(OWN_VARIABLES & arguments.keys()):
            raise refuse(
                "chat_template_kwargs", f"cannot contain {wrong[0]}, because the server sets it", "invalid_value"
            )
        if self.continue_final_message and (self.add_generation_prompt or messages[-1].role != "assistant"):
            reason = "needs an assistant message at the end, and no add_generation_prompt"
            raise refuse("continue_final_message", reason, "invalid_value")
        return arguments | given(self, "add_generation_prompt", "continue_final_message")


class Thinking(NullIsAbsent):
    """Anthropic's and DeepSeek's switch for thinking.

    budget_tokens: has no effect, because only max_tokens limits the thinking
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None


class PredictedContent(NullIsAbsent):
    """Text that the answer is expected to repeat for the most part."""

    type: Literal["content"]
    content: Text | list[ContentPart]


def _predicted(value: str | PredictedContent) -> str | None:
    """Return the text of a prediction, or None if it is empty."""
    if isinstance(value, str):
        return value
    if isinstance(value.content, str):
        return value.content or None
    return "".join(part.text or "" for part in value.content) or None


class ChatCompletionRequest(with_ignored(SamplingFields, CHAT), TemplateFields):  # type: ignore[misc]
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Annotated[Annotated[Text | PredictedContent, ByType()], AfterValidator(_predicted)] | None = None
    reasoning_format: Literal["auto", "deepseek"] | None = None
    include_reasoning: Literal[True] | None = None
    parse_tool_calls: Literal[True] | None = None

    @property
    def own_names(self) -> Mapping[str, str]:
        return {} if self.enable_thinking is None else {"thinking": "enable_thinking"}

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_spec(self, tenant: str) -> ChatSpec:
        params, constraint_field = self.sampling_params(None)
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "needs logprobs: true", "invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            raise refuse("prompt_logprobs", "needs stream: false", "invalid_value")
        choice = self.tool_choice or ("auto" if self.tools else "none")
        tool_choice: ToolChoice = NamedTool(choice.function.name) if isinstance(choice, NamedToolChoice) else choice
        return ChatSpec(
            params=params,
            given=self.given_parameters,
            options=read_options(self, **self.draft_options()),
            constraint_field=constraint_field,
            tenant=tenant,
            breakpoints=openai_breakpoints(
                self.prompt_cache_options, self.prompt_cache_retention, _marked_texts(self.messages)
            ),
            is_followed=self.is_followed,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            messages=chat_messages(self.messages),
            tools=chat_tools([tool.function.model_dump() for tool in self.tools or ()], tool_choice),
            tool_choice=tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template_arguments=self.template_arguments(self.messages),
            thinking=_thinking(self),
            reasoning_effort=self.reasoning_effort,
        )


def _marked_texts(messages: Sequence[Message]) -> Iterator[tuple[str, PromptCacheBreakpoint | None]]:
    """Yield the texts of messages in order, each with its mark."""
    for message in messages:
        if isinstance(message.content, list):
            yield from ((part.text or "", part.prompt_cache_breakpoint) for part in message.content)
        else:
            yield message.content or "", None


def _thinking(body: ChatCompletionRequest) -> Literal["enabled", "disabled", "adaptive"]:
    if body.thinking is not None:
        return body.thinking.type
    return "adaptive" if body.enable_thinking is None else "enabled" if body.enable_thinking else "disabled"


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the conversation for `ChatSpec.messages`. Raises UsageError for the first invalid message."""
    converted = []
    known_calls: set[str] = set()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        _check(message, where, known_calls)
        shown = {"role": message.role, "content": _content(message, where), **given(message, "name", "tool_call_id")}
        if message.tool_calls:
            calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
            shown["tool_calls"] = [chat_call(*call) for call in calls]
        if reasoning := message.reasoning_content or message.reasoning:
            shown["reasoning_content"] = reasoning
        converted.append(shown)
    return converted


def _check(message: Message, where: str, known_calls: set[str]) -> None:
    """Check that a message has only fields of its role, and that a result has the id of an earlier call."""
    for name, owner in _OF_ROLE.items():
        if getattr(message, name) and message.role != owner:
            reason = f"belongs to messages of the {owner}, not of the {message.role}"
            raise refuse(f"{where}.{name}", reason, "invalid_value")
    known_calls.update(call.id for call in message.tool_calls or ())
    if message.role != "tool":
        return
    if not known_calls:
        text = f"{where} is a tool's result, but no earlier message of the assistant has tool_calls"
        raise UsageError(text, param=f"{where}.role", code="invalid_value")
    if message.tool_call_id is None:
        raise refuse(f"{where}.tool_call_id", "is required in a tool message", "missing_required_parameter")
    if message.tool_call_id not in known_calls:
        raise refuse(f"{where}.tool_call_id", "names no call in an earlier message", "invalid_value")


def _content(message: Message, where: str) -> MessageContent | None:
    content = message.content
    if content is None and message.role == "assistant" and (message.tool_calls or message.refusal):
        return None if message.refusal is None else plain(message.refusal)
    if content is None:
        raise refuse(f"{where}.content", "is required", "missing_required_parameter")
    if isinstance(content, str):
        return plain(content)
    if not content:
        raise refuse(f"{where}.content", "is an empty list", "empty_array")
    return in_a_row((_part(part, where, j) for j, part in enumerate(content)), "\n")


def _part(part: ContentPart, where: str, position: int) -> MessagePart:
    name = f"{where}.content[{position}]"
    if part.type == "text" or part.type == "refusal":
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise UsageError(f"{name}.{part.type} is required", param=f"{name}.text", code="missing_required_parameter")
        return PlainText(text)
    if part.type in _MEDIA:
        return replace(_media(part, name), pdf_as=part.pdf_as)
    text = f"{name} has the unknown type {quote(part.type)}; the parts of content must have the type text"
    raise UsageError(text, param=f"{where}.content", code="invalid_value")


def _media(part: ContentPart, name: str) -> Media:
    """Return the part as media.

    name: path of the part in the request
    """
    kind, where = _MEDIA[part.type], f"{name}.type"
    if part.type in ("image_url", "image"):
        given = part.image_url if part.image_url is not None else part.image or part.url
        url, detail = (given.url, given.detail) if isinstance(given, ImageUrl) else (given, None)
        field = f"{name}.image_url.url" if isinstance(given, ImageUrl) else f"{name}.{part.type}"
        if url is None:
            raise refuse(field, "is required", "missing_required_parameter")
        return Media(kind, where, ImageSource(url, field, detail=detail or part.detail or "auto"))
    if part.type == "video_url" and part.video_url is not None:
        detail = part.detail or "auto"
        if isinstance(part.video_url, ImageUrl):
            detail = part.video_url.detail or detail
            return Media(kind, where, ImageSource(part.video_url.url, f"{name}.video_url.url", detail=detail))
        return Media(kind, where, ImageSource(part.video_url, f"{name}.video_url", detail=detail))
    if part.type == "input_video" and part.input_video is not None:
        video, field = part.input_video, f"{name}.input_video"
        if video.data is not None:
            is_url, detail = video.data.startswith("data:"), part.detail or "auto"
            return Media(kind, where, ImageSource(video.data, f"{field}.data", not is_url, detail))
        if video.url is None:
            raise refuse(f"{field}.data", "is required", "missing_required_parameter")
        return Media(kind, where, ImageSource(video.url, f"{field}.url", detail=part.detail or "auto"))
    if part.type == "file" and part.file is not None:
        return of_file(part.file.file_data, part.file.filename, where, f"{name}.file.file_data")
    return Media(kind, where)
