"""The messages and tools of OpenAI's clients, their checks, and their form in `ChatSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from octavo.errors import UsageError
from octavo.server.errors import refuse
from octavo.server.generation.spec import NamedTool, ToolChoice, given
from octavo.server.http.json_body import Text, format_path, quote
from octavo.server.protocols.conversation import chat_call, chat_tool, check_call_arguments
from octavo.server.protocols.sampling_fields import NullIsAbsent

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")
# Types of OpenAI's interface that a text model cannot read.
_OTHER_PARTS = ("image_url", "input_audio", "file", "video_url", "audio_url", "image", "audio", "video")

# Variables of a template that the server itself sets.
_OWN_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenize", "bos_token", "eos_token"),
    }
)


class ContentPart(NullIsAbsent):
    """A part of the content. Only text is supported; other fields are allowed, to name the type in the error."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": True})

    type: Text
    text: Text | None = None
    refusal: Text | None = None


class CalledFunction(NullIsAbsent):
    """arguments: JSON text. parsed_arguments: a copy that OpenAI's client adds for its own use."""

    name: Text
    arguments: Text
    parsed_arguments: Any = None


class CalledTool(NullIsAbsent):
    """An earlier call of the model. index: left over by clients that have joined a stream."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(NullIsAbsent):
    """A message of any role. parsed: a copy of the content that OpenAI's client adds for its own use."""

    role: Annotated[Text, Field(json_schema_extra={"enum": list(ROLES)})]
    content: Text | list[ContentPart] | None = None
    name: Text | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: Text | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    parsed: Any = None


class FunctionTool(NullIsAbsent):
    """strict: the arguments must follow the schema. They always do if a tool must be called."""

    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(NullIsAbsent):
    """A tool that the model may call."""

    type: Text
    function: FunctionTool


class NamedFunction(NullIsAbsent):
    """The function that must be called."""

    name: Text


class NamedToolChoice(NullIsAbsent):
    """`tool_choice` that names a tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation for `ChatSpec.messages`. Raises UsageError for the first wrong message."""
    converted = []
    known_calls: set[str] = set()
    for i, message in enumerate(messages):
        _check_role(message, f"messages[{i}]")
        _check_calls(message, f"messages[{i}]", known_calls)
        converted.append(_convert(message, f"messages[{i}]"))
    return converted


def chat_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The tools for `ChatSpec.tools`. `json_schema.check_tools` checks their schemas and names."""
    for i, tool in enumerate(tools or ()):
        if tool.type != "function":
            reason = f"is {quote(tool.type)}; only functions are supported"
            raise refuse(f"tools[{i}].type", reason, "unsupported_value")
    return [chat_tool(**tool.function.model_dump()) for tool in tools or ()]


def chat_tool_choice(
    choice: Literal["none", "auto", "required"] | NamedToolChoice | None, has_tools: bool
) -> ToolChoice:
    """The choice for `ChatSpec.tool_choice`: auto if there are tools, unless the request says otherwise."""
    if isinstance(choice, NamedToolChoice):
        return NamedTool(choice.function.name)
    if choice is None:
        return "auto" if has_tools else "none"
    return choice


class TemplateFields(NullIsAbsent):
    """Fields of requests that say how the chat template renders the conversation."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def template_arguments(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The arguments for the template. Raises UsageError for what the server itself sets or cannot continue."""
        arguments = dict(self.chat_template_kwargs or {})
        if wrong := sorted(_OWN_VARIABLES & arguments.keys()):
            raise refuse("chat_template_kwargs", f"cannot hold {wrong[0]}, because the server sets it", "invalid_value")
        if self.continue_final_message and (self.add_generation_prompt or messages[-1].role != "assistant"):
            reason = "needs an assistant message at the end, and no add_generation_prompt"
            raise refuse("continue_final_message", reason, "invalid_value")
        return arguments | given(self, "add_generation_prompt", "continue_final_message")


def _check_role(message: Message, where: str) -> None:
    if message.role not in ROLES:
        raise refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {quote(message.role)}", "invalid_value")
    for name in ("tool_calls", "refusal", "reasoning_content", "reasoning"):
        if getattr(message, name) and message.role != "assistant":
            reason = f"belongs to messages of the assistant, not of the {message.role}"
            raise refuse(f"{where}.{name}", reason, "invalid_value")
    if message.tool_call_id is not None and message.role != "tool":
        reason = f"belongs to messages of a tool, not of the {message.role}"
        raise refuse(f"{where}.tool_call_id", reason, "invalid_value")


def _check_calls(message: Message, where: str, known_calls: set[str]) -> None:
    """Checks that each result has the id of an earlier call."""
    for j, call in enumerate(message.tool_calls or ()):
        check_call_arguments(call.function.arguments, f"{where}.tool_calls[{j}].function.arguments")
        known_calls.add(call.id)
    if message.role != "tool":
        return
    if not known_calls:
        text = f"{where} is a tool's result, but no message of the assistant before it has tool_calls"
        raise UsageError(text, param=f"{where}.role", code="invalid_value")
    if message.tool_call_id is None:
        raise refuse(f"{where}.tool_call_id", "is required in a tool's message", "missing_required_parameter")
    if message.tool_call_id not in known_calls:
        raise refuse(f"{where}.tool_call_id", "names no call in an earlier message", "invalid_value")


def _convert(message: Message, where: str) -> dict[str, Any]:
    converted = {"role": message.role, "content": _content(message, where), **given(message, "name", "tool_call_id")}
    if message.tool_calls:
        converted["tool_calls"] = [
            chat_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        converted["reasoning_content"] = reasoning
    return converted


def _content(message: Message, where: str) -> str | list[dict[str, str]] | None:
    content = message.content
    if content is None and message.role == "assistant" and (message.tool_calls or message.refusal):
        return message.refusal
    if content is None:
        raise refuse(f"{where}.content", "is required", "missing_required_parameter")
    if isinstance(content, str):
        return content
    if not content:
        raise refuse(f"{where}.content", "is an empty list", "empty_array")
    return [_text_part(part, where, j) for j, part in enumerate(content)]


def _text_part(part: ContentPart, where: str, position: int) -> dict[str, str]:
    name = f"{where}.content[{position}]"
    if part.type == "text" or part.type == "refusal":
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise UsageError(f"{name}.{part.type} is required", param=f"{name}.text", code="missing_required_parameter")
        extra = set(part.model_extra or ()) - {"cache_control"}
        if extra:
            wrong = format_path((name, sorted(extra)[0]))
            raise UsageError(f"{wrong} is not a parameter of text", param=wrong, code="unsupported_parameter")
        return {"type": "text", "text": text}
    if part.type in _OTHER_PARTS:
        raise refuse(f"{name}.type", f"is {part.type}; this model reads text only", "unsupported_value")
    text = f"{name} has the unknown type {quote(part.type)}; parts of content are of type text"
    raise UsageError(text, param=f"{where}.content", code="invalid_value")
