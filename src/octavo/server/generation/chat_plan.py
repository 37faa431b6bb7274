"""Adapts a conversation to a model: to its chat template, its tool call format and its reasoning format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.engine.texts.schemas import close_objects
from octavo.errors import UsageError
from octavo.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams, changed
from octavo.server.errors import refuse
from octavo.server.generation.content import ImagePlan
from octavo.server.generation.events import ChoiceReader
from octavo.server.generation.spec import ChatSpec, NamedTool
from octavo.server.generation.thinking import reasoning_arguments
from octavo.server.generation.tool_messages import for_plain_template, for_tool_template
from octavo.server.models.served_model import ServedModel
from octavo.server.reasoning.reasoning_format import ReasoningFormat, find_reasoning_format
from octavo.server.tool_parsers.answer import Tool
from octavo.server.tool_parsers.grammar import or_json
from octavo.server.tool_parsers.tool_format import ToolFormat, ToolParser, tool_formats
from octavo.tokenizer.tokenizer import Tokenizer

# The tool format for models whose template does not support tools.
_TAUGHT_FORMAT = "hermes"
# Enough for the mark that opens the thinking, and white space after it.
_NUM_LAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parsers that split an answer into text, reasoning and tool calls.

    create_tool_parser: None if the answer contains no calls
    reasoning: None if reasoning stays in the text
    ignored_fields: fields of the spec that have no effect on this model
    """

    create_tool_parser: Callable[[], ToolParser] | None = None
    reasoning: ReasoningFormat | None = None
    parallel_tool_calls: bool = True
    ignored_fields: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True if the answer is plain text. Then no part ends it early, and all its tokens are counted together."""
        return self.create_tool_parser is None and self.reasoning is None

    def create_reader(self, index: int, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> ChoiceReader:
        """Create a reader for choice `index` of the answer to this prompt."""
        tools = None if self.create_tool_parser is None else self.create_tool_parser()
        reasoning = None
        if self.reasoning is not None:
            end = tokenizer.decode(prompt_token_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
            reasoning = self.reasoning.create_parser(end)
        return ChoiceReader(index, tools, reasoning, parallel_tool_calls=self.parallel_tool_calls)


def plan_chat(model: ServedModel, spec: ChatSpec) -> tuple[ChatSpec, AnswerFormat]:
    """Adapt a request to the model's template. Return it with the constraints of its tools, and the answer format.

    If both tools and a JSON format are given, the answer is either calls or JSON. Raises UsageError if tools are
    combined with another constraint, or if the model cannot read a part of a message.
    """
    tools = list(spec.tools) if spec.tool_choice != "none" else []
    template = model.tokenizer.template_source(has_tools=bool(tools))
    tool_format = model.tool_format or tool_formats()[_TAUGHT_FORMAT]
    has_no_tools = tool_format.system_prompt is not None and "tools" not in template
    is_taught = model.tool_format is None or has_no_tools or tool_format.has_system_tools
    switches, ignored_fields = reasoning_arguments(template, spec.thinking, spec.reasoning_effort)
    arguments = {**spec.template_arguments, **switches}
    images = ImagePlan(model)
    messages = [_for_template(message, images, "developer" in template) for message in spec.messages]
    # Models do not know `strict`; only the engine uses it.
    functions = [{key: value for key, value in tool["function"].items() if key != "strict"} for tool in tools]
    shown_tools = [{**tool, "function": function} for tool, function in zip(tools, functions, strict=True)]
    if is_taught:
        messages = for_plain_template(messages, shown_tools, tool_format)
    else:
        messages = for_tool_template(messages, tool_format, template)
        if tools:
            arguments["tools"] = shown_tools
    params = spec.params
    create_tool_parser = None
    if tools:
        params = _with_tools(spec, tools, tool_format, model.tokenizer)
        create_tool_parser = partial(ToolParser, tool_format, tools)
    reasoning = find_reasoning_format(template)
    if reasoning is not None:
        is_control_token = _token_id(model.tokenizer, reasoning.close) in model.tokenizer.special_token_ids
        # Forced calls leave no room for thinking, and grammars' texts have no control tokens. Grammars that allow calls
        # as well as channels name their tokens.
        is_free = tools and spec.tool_choice == "auto" and spec.params.structured_outputs is None
        if params.structured_outputs is not None and (not is_free or (is_control_token and not reasoning.has_channels)):
            reasoning = None
        elif is_control_token:
            params = changed(params, skip_special_tokens=False)
    adapted = dataclasses.replace(
        spec,
        messages=messages,
        images=images if images.sources else None,
        template_arguments=arguments,
        params=params,
        # With tools, the constraint is the one that makes the model call them.
        constraint_field="tools" if tools else spec.constraint_field,
    )
    return adapted, AnswerFormat(create_tool_parser, reasoning, spec.parallel_tool_calls, ignored_fields)


def _with_tools(
    spec: ChatSpec, tools: list[Tool], tool_format: ToolFormat, tokenizer: Tokenizer
) -> SamplingParams | BeamSearchParams:
    """Return the request's parameters with the constraints of its tools."""
    token_ids, params = mark_token_ids(tokenizer, tool_format), spec.params
    if not tokenizer.special_token_ids.isdisjoint(token_ids.values()):
        params = changed(params, skip_special_tokens=False)
    wanted = params.structured_outputs
    if wanted is not None and wanted.json is None and not wanted.json_object:
        raise refuse("tools", "can be combined with an answer in JSON, but not with another constraint")
    if wanted is not None and spec.tool_choice == "auto" and tool_format.is_bare:
        reason = "of this model cannot be told from an answer in JSON; send tool_choice none or required"
        raise refuse("tools", f"cannot be combined with an answer format, because calls {reason}")
    sampling = None if isinstance(params, BeamSearchParams) else params
    write, may_be_many = tool_format.grammar, spec.parallel_tool_calls
    if spec.tool_choice == "auto" and wanted is None:
        strict = [i for i, tool in enumerate(tools) if tool["function"].get("strict")]
        if not strict:
            return params
        if tool_format.optional_grammar is None or sampling is None:
            what = "beam search" if sampling is None else "this model's tool call format"
            message = f"{what} cannot enforce the schema of arguments with tool_choice auto; leave strict out"
            raise UsageError(message, param=f"tools[{strict[0]}].function.strict", code="unsupported_value")
        write = tool_format.optional_grammar
    elif sampling is None:
        message = "beam search cannot be made to call a tool; use tool_choice auto, or leave use_beam_search out"
        raise UsageError(message, param="tool_choice", code="unsupported_value")
    elif isinstance(spec.tool_choice, NamedTool):
        name, may_be_many = spec.tool_choice.name, False
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    is_closed = bool(spec.options.closed_objects)
    grammar = write([_closed(tool) for tool in tools] if is_closed else tools, may_be_many, token_ids)
    if wanted is not None and spec.tool_choice == "auto":
        schema = {"type": "object"} if wanted.json is None else json.loads(str(wanted.json))
        schema = schema if isinstance(schema, dict) else {}  # true
        grammar = or_json(grammar, close_objects(schema) if is_closed else schema)
    return changed(sampling, structured_outputs=StructuredOutputsParams(grammar=grammar))


def _closed(tool: Tool) -> Tool:
    """Return the tool with `closed_objects` applied to its parameters."""
    function = tool["function"]
    if not function.get("parameters"):
        return tool
    return {**tool, "function": {**function, "parameters": close_objects(function["parameters"])}}


def _for_template(message: Mapping[str, Any], images: ImagePlan, knows_developers: bool) -> dict[str, Any]:
    """Return the message with content and a role that templates understand.

    images: receives the message's images
    """
    plain = dict(message)
    if plain.get("content") is not None:
        plain["content"] = images.text(plain["content"])
    if plain["role"] == "developer" and not knows_developers:
        plain["role"] = "system"
    return plain


def mark_token_ids(tokenizer: Tokenizer, tool_format: ToolFormat) -> dict[str, int]:
    """Return the token ids of those marks of the format that are single tokens in this vocabulary."""
    found = {mark: _token_id(tokenizer, mark) for mark in tool_format.marks}
    return {mark: token_id for mark, token_id in found.items() if token_id is not None}


def _token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of the single token with exactly this text, or None if there is none."""
    token_ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    is_one = len(token_ids) == 1 and tokenizer.token_bytes(token_ids[0]) == text.encode()
    return token_ids[0] if is_one else None
