"""The tools of Responses: functions, custom tools, tools in a namespace, and tools that only OpenAI's servers have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field
from pydantic_core import from_json

from octavo.server.errors import refuse
from octavo.server.generation.spec import NamedTool, ToolChoice
from octavo.server.http.json_body import RequestModel, Text
from octavo.server.protocols.protocol_fields import ByType, Historic, NullIsAbsent

# The argument of a custom tool's function that contains its text.
_INPUT = "input"


class CallableTool(NullIsAbsent):
    """A tool that the model can call.

    defer_loading: has no effect, because there is no search for tools
    allowed_callers: has no effect, because only the model calls tools
    output_schema: has no effect, because it describes results
    """

    name: Text
    description: Text | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Text] | None = None


class FunctionTool(CallableTool):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class PlainInput(NullIsAbsent):
    type: Literal["text"]


class GrammarInput(NullIsAbsent):
    """A grammar for the text of a custom tool. The model reads it, but nothing enforces it."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Text


class CustomTool(CallableTool):
    """A tool that takes a text. The model calls it as a function with that text as its argument."""

    type: Literal["custom"]
    format: Annotated[PlainInput | GrammarInput, ByType()] | None = None


OwnTool: TypeAlias = FunctionTool | CustomTool


class NamespaceTool(NullIsAbsent):
    """Tools that the client groups under a common name, such as the tools of one MCP server."""

    type: Literal["namespace"]
    name: Text
    description: Text | None = None
    tools: list[Annotated[OwnTool, ByType()]]


class HostedTool(Historic):
    """A tool that OpenAI's servers run. Agents offer such tools by default, and the model does not see them."""

    type: Literal[
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "image_generation",
        "tool_search",
    ]


AnyTool: TypeAlias = Annotated[OwnTool | NamespaceTool | HostedTool, ByType()]


class NamedToolChoice(RequestModel):
    """The function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: Text
    namespace: Text | None = None


class AllowedTool(Historic):
    """A tool that may be called. One without a name runs on OpenAI's servers."""

    type: Text
    name: Text | None = None
    namespace: Text | None = None


class AllowedToolsChoice(RequestModel):
    """A choice that lets the model see only these tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1)


AnyToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice, ByType()
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the model sees it.

    wire_name: its name for the model
    """

    wire_name: str
    tool: OwnTool
    namespace: str | None

    @property
    def function(self) -> dict[str, Any]:
        """The tool as a function for `chat_tools`."""
        tool = self.tool
        shown: dict[str, Any] = {"name": self.wire_name, "description": tool.description}
        if isinstance(tool, FunctionTool):
            return {**shown, "parameters": tool.parameters, "strict": tool.strict}
        if isinstance(tool.format, GrammarInput):
            rule = f"The input follows this {tool.format.syntax} grammar:\n{tool.format.definition}"
            shown["description"] = f"{tool.description}\n\n{rule}" if tool.description else rule
        properties = {_INPUT: {"type": "string"}}
        return {**shown, "parameters": {"type": "object", "properties": properties, "required": [_INPUT]}}


def wire_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def offered_tools(tools: Sequence[AnyTool] | None) -> Iterator[OfferedTool]:
    """Yield the tools that the model can call."""
    for tool in tools or ():
        if isinstance(tool, NamespaceTool):
            for member in tool.tools:
                yield OfferedTool(wire_name(member.name, tool.name), member, tool.name)
        elif not isinstance(tool, HostedTool):
            yield OfferedTool(tool.name, tool, None)


def tool_choice_of(choice: str | NamedToolChoice | AllowedToolsChoice | None) -> ToolChoice:
    """Return the choice of tools for a `ChatSpec`. A tool has the name by which the model knows it."""
    if isinstance(choice, NamedToolChoice):
        return NamedTool(wire_name(choice.name, choice.namespace))
    if isinstance(choice, AllowedToolsChoice):
        return choice.mode
    return "none" if choice == "none" else "required" if choice == "required" else "auto"


def allowed_functions(
    tools: Sequence[AnyTool] | None, choice: str | NamedToolChoice | AllowedToolsChoice | None
) -> list[dict[str, Any]]:
    """Return the functions that the model may call.

    Raises UsageError if the model can call none of the tools, and if the choice names a tool that is not given.
    """
    for i, tool in enumerate(tools or ()):
        if isinstance(tool, HostedTool) and not any(True for _ in offered_tools(tools)):
            reason = f"is {tool.type}, a tool that this server does not have; it is ignored if there are other tools"
            raise refuse(f"tools[{i}].type", reason)
    found = list(offered_tools(tools))
    if isinstance(choice, AllowedToolsChoice):
        names = {wire_name(item.name, item.namespace) for item in choice.tools if item.name is not None}
        if missing := sorted(names - {item.wire_name for item in found}):
            raise refuse("tool_choice.tools", f"allows {missing[0]!r}, which is not one of the tools", "invalid_value")
        found = [item for item in found if item.wire_name in names]
    return [item.function for item in found]


def ignored_parts(tools: Sequence[AnyTool] | None) -> list[str]:
    """Return the names of the hosted tools, and of the other tools' fields that have no effect."""
    hosted = sorted({f"tools.{tool.type}" for tool in tools or () if isinstance(tool, HostedTool)})
    own = [item.tool for item in offered_tools(tools)]
    parts = {
        "tools.defer_loading": any(tool.defer_loading for tool in own),
        "tools.allowed_callers": any(set(tool.allowed_callers or ()) - {"direct"} for tool in own),
        "tools.format": any(isinstance(tool, CustomTool) and isinstance(tool.format, GrammarInput) for tool in own),
        "tools.output_schema": any(isinstance(tool, FunctionTool) and tool.output_schema for tool in own),
    }
    return [*hosted, *(name for name, is_given in parts.items() if is_given)]


def shown_tool(tool: AnyTool) -> dict[str, Any]:
    """Return a tool as the response repeats it. Fields that were not given are left out, except for a few that are
    always included.
    """
    always = ("description", "parameters", "strict") if isinstance(tool, FunctionTool) else ()
    fields: Mapping[str, Any] = tool.model_dump()
    return {name: value for name, value in fields.items() if value is not None or name in always}


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that represents a custom tool."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the text for a custom tool, even from arguments that were cut off. Arguments of any other form are
    returned unchanged.
    """
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = value.get(_INPUT, "") if isinstance(value, dict) and value.keys() <= {_INPUT} else arguments
    return text if isinstance(text, str) else arguments
