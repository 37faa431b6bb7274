"""Earlier tool calls and results, as chat templates want them."""

from __future__ import annotations

import copy
import json
from typing import Any

import jinja2
import pytest

from octavo.server.generation.tool_messages import for_plain_template, for_tool_template
from octavo.server.tool_parsers.answer import CallArguments, CallStart
from octavo.server.tool_parsers.tool_format import ToolParser, tool_formats
from tests.support.tool_outputs import TOOLS


def assistant(*calls: tuple[str, str, str], content: str | None = None) -> dict[str, Any]:
    functions = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


USER = {"role": "user", "content": "What is it like?"}
CONVERSATION = [
    USER,
    assistant(("call_abc", "get_weather", '{"city": "Paris"}'), ("call_def", "now", "")),
    result("call_abc", "rain"),
    result("call_def", "noon"),
    {"role": "user", "content": "And now?"},
]


def test_arguments_become_objects() -> None:
    before = copy.deepcopy(CONVERSATION)
    messages = for_tool_template(CONVERSATION, tool_formats()["hermes"])
    assert before == CONVERSATION
    assert [call["function"]["arguments"] for call in messages[1]["tool_calls"]] == [{"city": "Paris"}, {}]
    assert messages[1]["content"] == ""
    assert messages[2:] == CONVERSATION[2:]


def test_calls_are_messages_where_templates_show_none() -> None:
    conversation = [*CONVERSATION, assistant(("1", "now", "{}"), content="So.")]
    assert for_tool_template(conversation, tool_formats()["glm4"], "<|observation|>")[3]["role"] == "tool"
    messages = for_tool_template(conversation, tool_formats()["glm4"], "{% if role == 'observation' %}")
    assert messages[1:3] == [
        {"role": "assistant", "metadata": "get_weather", "content": '{"city": "Paris"}'},
        {"role": "assistant", "metadata": "now", "content": "{}"},
    ]
    assert [(each["role"], each["content"]) for each in messages[3:5]] == [
        ("observation", "rain"),
        ("observation", "noon"),
    ]
    assert messages[6:] == [
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "metadata": "now", "content": "{}"},
    ]
    messages = for_tool_template(CONVERSATION, tool_formats()["nemotron_mini"])
    written = '<toolcall> {"name": "get_weather", "arguments": {"city": "Paris"}} </toolcall>'
    assert messages[1] == {"role": "assistant", "content": written}
    assert messages[3]["role"] == "tool"


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '"x"', "{'a': 1}"])
def test_what_is_no_object_stays_text(arguments: str) -> None:
    messages = for_tool_template([assistant(("1", "f", arguments))], tool_formats()["hermes"])
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_functionary_wants_text() -> None:
    messages = for_tool_template(CONVERSATION, tool_formats()["functionary"])
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


def test_mistral_wants_ids_of_nine_characters() -> None:
    messages = for_tool_template([*CONVERSATION, assistant(("abcDEF123", "now", "{}"))], tool_formats()["mistral"])
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert ids == [message["tool_call_id"] for message in messages[2:4]]
    assert len(set(ids)) == 2
    assert messages[-1]["tool_calls"][0]["id"] == "abcDEF123"


def test_kimi_finds_the_names_of_functions_in_ids() -> None:
    """Calls are counted through the conversation; a result has the id of the last call that it can mean."""
    later = [assistant(("call_abc", "now", "{}")), result("call_abc", "night"), result("call_gone", "?")]
    messages = for_tool_template([*CONVERSATION, *later], tool_formats()["kimi_k2"])
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == ["functions.get_weather:0", "functions.now:1", "functions.now:2"]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == [*calls, "call_gone"]


@pytest.mark.parametrize("name", ["hermes", "gemma"])
def test_templates_without_tools_get_text_and_turns(name: str) -> None:
    tool_format = tool_formats()[name]
    messages = for_plain_template(CONVERSATION, TOOLS, tool_format)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert all(isinstance(message["content"], str) for message in messages)
    assert all(tool["function"]["name"] in messages[0]["content"] for tool in TOOLS)
    assert messages[3]["content"] == (
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\nAnd now?"
    )
    parser = ToolParser(tool_format, TOOLS)
    assert [*parser.push(messages[2]["content"]), *parser.finish()] == [
        CallStart("get_weather"),
        CallArguments('{"city": "Paris"}'),
        CallStart("now"),
        CallArguments("{}"),
    ]


def test_the_description_joins_the_system_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    messages = for_plain_template([system, USER], TOOLS, tool_formats()["hermes"])
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call functions")
    lines = messages[0]["content"].split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in lines] == TOOLS
    assert system["content"] == "Be brief."


def test_without_tools_nothing_changes() -> None:
    assert for_plain_template([USER], [], tool_formats()["hermes"]) == [USER]


def test_a_format_that_needs_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="mistral needs a template"):
        for_plain_template([USER], TOOLS, tool_formats()["mistral"])


def test_the_template_of_phi4_mini_takes_tools_from_the_system_message() -> None:
    """Against the prompt that the model card of Phi-4-mini-instruct shows."""
    template = (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
        "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + "
        "message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + "
        "message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    )
    tool_format = tool_formats()["phi4_mini"]
    assert tool_format.matches(template)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    shown = '<|tool|>[{"name": "now", "parameters": {}}]<|/tool|><|end|><|user|>Hi<|end|>'
    for given, start in ((messages, "<|system|>Be brief."), (messages[1:], "<|system|>")):
        converted = for_plain_template(given, [tool], tool_format)
        assert jinja2.Template(template).render(messages=converted) == start + shown
    assert "tools" not in messages[0]
