"""Answers with tool calls as models write them, and what they should become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def tool(name: str, properties: dict[str, Any] | None = None, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """A tool in OpenAI's shape."""
    parameters = {"type": "object", "properties": properties or {}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": parameters}}


TOOLS = [
    tool("get_weather", {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}}, ("city",)),
    tool("run", {"code": {"type": "string"}, "options": {"type": "object"}}),
    tool("now"),
]


@dataclass(frozen=True)
class Case:
    """format: by name. text: the answer. calls: name and arguments of each. content: the text around them."""

    format: str
    name: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    content: str = ""


_PARIS = '{"city": "Paris"}'
_NESTED = '{"code": "a", "options": {"deep": [{"x": [1, 2.5e3, -1]}, null, true], "s": "}{][\\\\"}}'
_ESCAPES = '{"city": "Par\\u00e9 \\ud83d\\ude00 \\"quoted\\" \\\\ \\n"}'
_INJECTION = "{\"code\": \"__import__('os').system('rm -rf /')\"}"


def _hermes(name: str, text: str, *calls: tuple[str, str], content: str = "") -> Case:
    return Case("hermes", name, text, calls, content)


def _tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES = [
    _hermes("one", _tagged("get_weather", _PARIS), ("get_weather", _PARIS)),
    _hermes("no_line_breaks", '<tool_call>{"name":"now","arguments":{}}</tool_call>', ("now", "{}")),
    _hermes("parallel", f"{_tagged('now', '{}')}\n{_tagged('run', '{}')}", ("now", "{}"), ("run", "{}")),
    _hermes("text_before", f"Let me look.\n\n{_tagged('now', '{}')}", ("now", "{}"), content="Let me look."),
    _hermes("text_behind", f"{_tagged('now', '{}')}\n\nDone.\n", ("now", "{}"), content="Done.\n"),
    _hermes(
        "text_between",
        f"First \n{_tagged('now', '{}')}\nthen\n{_tagged('now', '{}')}last",
        ("now", "{}"),
        ("now", "{}"),
        content="First \nthen\nlast",
    ),
    _hermes("nested", _tagged("run", _NESTED), ("run", _NESTED)),
    _hermes("escapes", _tagged("get_weather", _ESCAPES), ("get_weather", _ESCAPES)),
    _hermes(
        "close_tag_in_string",
        _tagged("run", '{"code": "print(\'</tool_call>\') # <tool_call> {"}'),
        ("run", '{"code": "print(\'</tool_call>\') # <tool_call> {"}'),
    ),
    _hermes("white_space", _tagged("run", '{\n  "code" :\t"x" }'), ("run", '{\n  "code" :\t"x" }')),
    _hermes("arguments_first", '<tool_call>{"arguments": {"a": 1}, "name": "run"}</tool_call>', ("run", '{"a": 1}')),
    _hermes("parameters", '<tool_call>{"name": "run", "parameters": {"a": 1}}</tool_call>', ("run", '{"a": 1}')),
    _hermes("other_keys", '<tool_call>{"id": 7, "name": "run", "x": [{}], "arguments": {}}</tool_call>', ("run", "{}")),
    _hermes("no_arguments", '<tool_call>{"name": "now"}</tool_call>', ("now", "{}")),
    _hermes("null_arguments", '<tool_call>{"name": "now", "arguments": null}</tool_call>', ("now", "{}")),
    _hermes("empty_string", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', ("now", "{}")),
    _hermes(
        "arguments_as_string",
        '<tool_call>{"name": "run", "arguments": "{\\"code\\": \\"\\\\n\\u00e9\\ud83d\\ude00\\"}"}</tool_call>',
        ("run", '{"code": "\\né😀"}'),
    ),
    _hermes(
        "lone_surrogate",
        '<tool_call>{"name":"run","arguments":"\\ud83dx\\udc00"}</tool_call>',
        ("run", "\ufffdx\ufffd"),
    ),
    _hermes("escaped_name", '<tool_call>{"name": "r\\u0075n", "arguments": {}}</tool_call>', ("run", "{}")),
    _hermes("unknown_tool", _tagged("launch_rocket", "{}"), ("launch_rocket", "{}")),
    _hermes("injection", _tagged("run", _INJECTION), ("run", _INJECTION)),
    _hermes("brace_too_many", '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>', ("now", "{}")),
    _hermes("brace_missing", '<tool_call>\n{"name": "now", "arguments": {"a": 1}\n</tool_call>', ("now", '{"a": 1}')),
    _hermes(
        "two_braces_missing",
        '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call><tool_call>{"name": "run"}</tool_call>',
        ("now", '{"a": 1'),
        ("run", "{}"),
    ),
    _hermes(
        "close_tag_missing", '<tool_call>\n{"name": "now", "arguments": {}}\nHello', ("now", "{}"), content="Hello"
    ),
    _hermes("open_tag_twice", f"<tool_call>\n{_tagged('now', '{}')}", ("now", "{}")),
    _hermes("cut_in_arguments", '<tool_call>\n{"name": "run", "arguments": {"code": "pri', ("run", '{"code": "pri')),
    _hermes("cut_behind_name", '<tool_call>{"name": "run", "argu', ("run", "")),
    _hermes("cut_in_name", 'a <tool_call>{"name": "ru', content='a {"name": "ru'),
    _hermes("cut_in_tag", "Hello <tool_", content="Hello <tool_"),
    _hermes("cut_in_escape", '<tool_call>{"name":"run","arguments":"{\\u00', ("run", "{")),
    _hermes("no_json", "<tool_call>now()</tool_call> x", content="now() x"),
    _hermes("python_dict", "<tool_call>{'name': 'now'}</tool_call>", content="{'name': 'now'}"),
    _hermes("no_name", '<tool_call>{"arguments": {}}</tool_call>', content='{"arguments": {}}'),
    _hermes(
        "name_is_number", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', content='{"name": 3, "arguments": {}}'
    ),
    _hermes("bare", '{"name": "get_weather", "arguments": {"city": "Paris"}}', ("get_weather", _PARIS)),
    _hermes("bare_unknown", '{"name": "Alice", "arguments": {}}', content='{"name": "Alice", "arguments": {}}'),
    _hermes("bare_json", 'So: {"name": "now", "age": 3}', content='So: {"name": "now", "age": 3}'),
    _hermes("fenced", 'Sure:\n```json\n{"name": "now", "arguments": {}}\n```\nok', ("now", "{}"), content="Sure:\nok"),
    _hermes(
        "fenced_other",
        '```json\n{"a": {"name": "now"}}\n```\n```python\nx = {1: 2}\n```',
        content='```json\n{"a": {"name": "now"}}\n```\n```python\nx = {1: 2}\n```',
    ),
    _hermes("just_text", "  Hello {world} `x` </b> <tool> \n", content="  Hello {world} `x` </b> <tool> \n"),
    _hermes("empty", ""),
]

_SHOWN = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
LLAMA = [
    Case("llama3_json", "one", _SHOWN, (("get_weather", _PARIS),)),
    Case("llama3_json", "tag", f"<|python_tag|>{_SHOWN}", (("get_weather", _PARIS),)),
    Case("llama3_json", "tag_unknown", '<|python_tag|>{"name": "x", "parameters": {}}', (("x", "{}"),)),
    Case("llama3_json", "several", f"{_SHOWN}; {_SHOWN};\n{_SHOWN}", (("get_weather", _PARIS),) * 3),
    Case("llama3_json", "type", '{"type": "function", "name": "now", "parameters": {}}', (("now", "{}"),)),
    Case("llama3_json", "text_around", f"Sure! {_SHOWN} ok", (("get_weather", _PARIS),), "Sure! ok"),
    Case("llama3_json", "nested", '{"name": "run", "parameters": ' + _NESTED + "}", (("run", _NESTED),)),
    Case("llama3_json", "no_call", '{"name": "Bob", "age": 3}', content='{"name": "Bob", "age": 3}'),
    Case("llama3_json", "python", "<|python_tag|>print({1: 2})", content="print({1: 2})"),
    Case("llama3_json", "cut", '{"name": "run", "parameters": {"code": "x', (("run", '{"code": "x'),)),
    Case("llama3_json", "cut_early", '{"name": "run", "par', content='{"name": "run", "par'),
    Case("llama3_json", "no_parameters", '{"name": "now"}', (("now", "{}"),)),
    Case("llama3_json", "braces", "f(x) = {x | x > {0}} {", content="f(x) = {x | x > {0}} {"),
]

MISTRAL = [
    Case(
        "mistral",
        "list",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_PARIS}}}]',
        (("get_weather", _PARIS),),
    ),
    Case(
        "mistral",
        "parallel",
        '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdef123"}, {"arguments": {"a": "]"}, "name": "run"}]',
        (("now", "{}"), ("run", '{"a": "]"}')),
    ),
    Case("mistral", "newer", f"[TOOL_CALLS]get_weather[ARGS]{_PARIS}", (("get_weather", _PARIS),)),
    Case(
        "mistral",
        "newer_parallel",
        'Hm.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]run[ARGS]{"code": "[TOOL_CALLS]"}',
        (("now", "{}"), ("run", '{"code": "[TOOL_CALLS]"}')),
        "Hm.",
    ),
    Case("mistral_args", "one", f"[TOOL_CALLS]get_weather[ARGS]{_PARIS}", (("get_weather", _PARIS),)),
    Case("mistral_args", "white_space", "[TOOL_CALLS]now[ARGS] {}\n[TOOL_CALLS] now[ARGS]{}", (("now", "{}"),) * 2),
    Case("mistral", "call_id", "[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", (("now", "{}"),)),
    Case("mistral", "without_args_mark", "[TOOL_CALLS]now{}", (("now", "{}"),)),
    Case("mistral", "single_object", '[TOOL_CALLS]{"name": "now", "arguments": {}}', (("now", "{}"),)),
    Case("mistral", "cut", '[TOOL_CALLS][{"name": "run", "arguments": {"code"', (("run", '{"code"'),)),
    Case("mistral", "cut_header", "[TOOL_CALLS]run[ARGS]", (("run", ""),)),
    Case("mistral", "broken", "[TOOL_CALLS] no, sorry!", content="no, sorry!"),
    Case("mistral", "text", "A list: [1, 2] [TOOL", content="A list: [1, 2] [TOOL"),
]

FUNCTIONARY = [
    Case("functionary", "one", f"<function=get_weather>{_PARIS}</function>", (("get_weather", _PARIS),)),
    Case(
        "functionary",
        "parallel",
        'ok <function=now>{}</function><function=run>{"code": "</function>"}</function> then',
        (("now", "{}"), ("run", '{"code": "</function>"}')),
        "ok then",
    ),
    Case("functionary", "empty", "<function=now></function>", (("now", "{}"),)),
    Case("functionary", "line_breaks", "<function=now>\n{}\n</function>\n", (("now", "{}"),)),
    Case("functionary", "cut", '<function=run>{"code": "', (("run", '{"code": "'),)),
    Case("functionary", "no_call", "Use <function=name(x)> here", content="Use <function=name(x)> here"),
    Case("functionary_recipients", "text", "all\nHello there", content="Hello there"),
    Case("functionary_recipients", "one", f"get_weather\n{_PARIS}", (("get_weather", _PARIS),)),
    Case(
        "functionary_recipients",
        "text_and_calls",
        'all\nLet me look.\n>>>now\n{}\n>>>run\n{"code": ">>>x\\n"}',
        (("now", "{}"), ("run", '{"code": ">>>x\\n"}')),
        "Let me look.",
    ),
    Case("functionary_recipients", "no_recipient", "Hello >>> there", content="Hello >>> there"),
    Case("functionary_recipients", "cut", "get_wea", content="get_wea"),
]

GEMMA = [
    Case("gemma", "fenced", f"```json\n{_SHOWN}\n```", (("get_weather", _PARIS),)),
    Case("gemma", "tool_code", f"```tool_code\n{_SHOWN}\n```\n", (("get_weather", _PARIS),)),
    Case("gemma", "two_blocks", f"```json\n{_SHOWN}\n```\n```json\n{_SHOWN}\n```", (("get_weather", _PARIS),) * 2),
    Case("gemma", "list", f"```json\n[\n{_SHOWN},\n{_SHOWN}\n]\n```", (("get_weather", _PARIS),) * 2),
    Case("gemma", "bare", _SHOWN, (("get_weather", _PARIS),)),
    Case("gemma", "text_around", f"Sure:\n```json\n{_SHOWN}\n```\nok", (("get_weather", _PARIS),), "Sure:\nok"),
    Case("gemma", "code", "```python\nd = {}\n``` done", content="```python\nd = {}\n``` done"),
    Case("gemma", "cut", '```json\n{"name": "run", "parameters": {"a": [', (("run", '{"a": ['),)),
]

CASES = [*HERMES, *LLAMA, *MISTRAL, *FUNCTIONARY, *GEMMA]


def realistic_tools(count: int) -> list[dict[str, Any]]:
    """Tools with parameters as assistants for programming have them, about 1.7 KB each."""
    location = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer", "minimum": 1}}}
    properties = {
        "query": {"type": "string", "description": "What to look for. " * 20, "minLength": 1},
        "kind": {"type": "string", "enum": [f"kind_{index}" for index in range(12)]},
        "limit": {"type": ["integer", "null"], "minimum": 1, "maximum": 1000, "default": 20},
        "since": {"type": "string", "format": "date-time", "description": "From when on. " * 10},
        "locations": {"type": "array", "items": {"$ref": "#/$defs/Location"}, "maxItems": 50},
        "filter": {"anyOf": [{"type": "string", "pattern": "^[a-z_.*]+$"}, {"type": "null"}]},
        "options": {
            "type": "object",
            "properties": {f"flag_{index}": {"type": "boolean", "description": "A flag."} for index in range(8)},
            "additionalProperties": False,
        },
    }
    tools = [
        tool(f"tool_{index}", {**properties, f"own_{index}": {"type": "number"}}, ("query",)) for index in range(count)
    ]
    for item in tools:
        item["function"]["parameters"]["$defs"] = {"Location": location}
    return tools
