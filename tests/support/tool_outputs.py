"""Answers with tool calls as models write them, and the expected results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.glm_outputs import GLM45
from tests.support.later_outputs import LATER


def tool(name: str, properties: dict[str, Any] | None = None, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a tool in OpenAI's format."""
    parameters = {"type": "object", "properties": properties or {}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": parameters}}


TOOLS = [
    tool("get_weather", {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}}, ("city",)),
    tool("run", {"code": {"type": "string"}, "options": {"type": "object"}}),
    tool("now"),
    tool(
        "set",
        {
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "s": {"enum": ["7", "8"]},
            "on": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "id": {"type": ["string", "integer"]},
        },
    ),
]


@dataclass(frozen=True)
class Case:
    """An answer and its expected result.

    format: name of the format.
    text: the answer.
    calls: name and arguments of each call.
    content: the text around them.
    """

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
    _hermes("cut_in_close_tag", f"Hm. {_tagged('now', '{}')}"[:-3], ("now", "{}"), content="Hm."),
    _hermes("cut_in_next_tag", f"{_tagged('now', '{}')}\n<tool_", ("now", "{}")),
    _hermes("cut_in_close_tag_of_text", f"{_tagged('now', '{}')} a </tool", ("now", "{}"), content="a </tool"),
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
    Case(
        "llama3_json",
        "llama4",
        f"<|python_start|>So.<|python_end|>{_SHOWN}{_SHOWN}",
        (("get_weather", _PARIS),) * 2,
        "So.",
    ),
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
    Case("functionary", "cut_in_close_tag", "<function=now>{}</func", (("now", "{}"),)),
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


def _xml(name: str, *parameters: tuple[str, str]) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def _qwen(name: str, text: str, *calls: tuple[str, str], content: str = "") -> Case:
    return Case("qwen3_coder", name, text, calls, content)


def _invoke(name: str, *parameters: tuple[str, str]) -> str:
    lines = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters)
    return f'<invoke name="{name}">\n{lines}</invoke>\n'


def _minimax(*invocations: str) -> str:
    return f"<minimax:tool_call>\n{''.join(invocations)}</minimax:tool_call>"


_RUN = ("run", '{"code": "if x:\\n\\ty"}')
MINIMAX_M2 = [
    ("one", _minimax(_invoke("get_weather", ("city", "Paris"))), (("get_weather", _PARIS),), ""),
    ("no_parameters", _minimax(_invoke("now")), (("now", "{}"),), ""),
    ("text_around", f"Hm.\n\n{_minimax(_invoke('now'))}\nSo.", (("now", "{}"),), "Hm.\n\nSo."),
    ("parallel", _minimax(_invoke("now"), _invoke("run", ("code", "if x:\n\ty"))), (("now", "{}"), _RUN), ""),
    ("numbers", _minimax(_invoke("set", ("n", "5"), ("s", "7"))), (("set", '{"n": 5, "s": "7"}'),), ""),
]
_SEED = _xml("run", ("code", "if x:\n\ty")).replace("tool_call", "seed:tool_call").replace("code>\n", "code>")
SEED_OSS = [
    ("one", _SEED.replace("\n</parameter>", "</parameter>"), (_RUN,), ""),
    ("no_parameters", _xml("now").replace("tool_call", "seed:tool_call"), (("now", "{}"),), ""),
    ("text_around", f"Hm. {_xml('now').replace('tool_call', 'seed:tool_call')}", (("now", "{}"),), "Hm."),
]


QWEN3_CODER = [
    _qwen("one", _xml("get_weather", ("city", "Paris")), ("get_weather", _PARIS)),
    _qwen("no_parameters", _xml("now"), ("now", "{}")),
    _qwen("text_around", f"Hm.\n\n{_xml('now')}\nSo.", ("now", "{}"), content="Hm.\n\nSo."),
    _qwen("parallel", f"{_xml('now')}\n{_xml('run', ('code', '1'))}", ("now", "{}"), ("run", '{"code": "1"}')),
    _qwen("lines", _xml("run", ("code", "if x:\n\ty \n\n")), ("run", '{"code": "if x:\\n\\ty \\n\\n"}')),
    _qwen("quoted", _xml("run", ("code", '"é\\n"')), ("run", '{"code": "\\"é\\\\n\\""}')),
    _qwen("empty", _xml("run", ("code", "")), ("run", '{"code": ""}')),
    _qwen("numbers", _xml("set", ("n", "5"), ("x", " 1.50 "), ("s", "7")), ("set", '{"n": 5, "x": 1.50, "s": "7"}')),
    _qwen("no_number", _xml("set", ("n", "five")), ("set", '{"n": "five"}')),
    _qwen("infinity", _xml("set", ("n", "NaN")), ("set", '{"n": "NaN"}')),
    _qwen("python", _xml("set", ("on", "True"), ("note", "None")), ("set", '{"on": true, "note": null}')),
    _qwen("json_names", _xml("set", ("on", "false"), ("note", "null")), ("set", '{"on": false, "note": null}')),
    _qwen("nullable", _xml("set", ("note", "nullify")), ("set", '{"note": "nullify"}')),
    _qwen("nearly_null", _xml("set", ("note", "nul")), ("set", '{"note": "nul"}')),
    _qwen("union_number", _xml("set", ("id", "12")), ("set", '{"id": 12}')),
    _qwen("union_text", _xml("set", ("id", "1a")), ("set", '{"id": "1a"}')),
    _qwen("union_other", _xml("set", ("id", "[1]")), ("set", '{"id": "[1]"}')),
    _qwen("object", _xml("run", ("options", '{"a": [1,\n2]}')), ("run", '{"options": {"a": [1,\n2]}}')),
    _qwen("unknown_tool", _xml("fly", ("a", "1"), ("b", "b c")), ("fly", '{"a": 1, "b": "b c"}')),
    _qwen("unknown_key", _xml("now", ('a "b"', "[]")), ("now", '{"a \\"b\\"": []}')),
    _qwen("twice", _xml("run", ("code", "a"), ("code", "b")), ("run", '{"code": "a"}')),
    _qwen("tight", "<function=run><parameter=code>a</parameter></function>", ("run", '{"code": "a"}')),
    _qwen("no_outer_tag", "Now:\n" + _xml("now")[len("<tool_call>\n") :], ("now", "{}"), content="Now:"),
    _qwen(
        "tags_in_text",
        _xml("run", ("code", "</parameter> <b></function>\n<parameter=x>\n</parameter>\n</param>")),
        ("run", '{"code": "</parameter> <b></function>\\n<parameter=x>\\n</parameter>\\n</param>"}'),
    ),
    _qwen(
        "no_end_of_parameter",
        "<tool_call>\n<function=run>\n<parameter=code>\na\n</function>\n</tool_call>",
        ("run", '{"code": "a"}'),
    ),
    _qwen("no_end_of_function", _xml("now").replace("</function>\n", ""), ("now", "{}")),
    _qwen(
        "junk_between",
        "<function=run><parameter=code>a</parameter>\n<parameter=x\ny",
        ("run", '{"code": "a"}'),
        content="<parameter=x\ny",
    ),
    _qwen("cut_in_text", '<tool_call>\n<function=run>\n<parameter=code>\nx "\n', ("run", '{"code": "x \\"')),
    _qwen("cut_in_number", "<function=set><parameter=n>\n12", ("set", '{"n": 12')),
    _qwen("cut_in_key", "<tool_call>\n<function=run>\n<parameter=co", ("run", "")),
    _qwen("cut_in_end", "<function=run>\n<parameter=code>\nx\n</para", ("run", '{"code": "x')),
    _qwen("cut_behind_end", "<function=run>\n<parameter=code>\nx\n</parameter>\n<", ("run", '{"code": "x"')),
    _qwen("cut_in_close_tag", _xml("now")[:-4], ("now", "{}")),
    _qwen("cut_in_name", "a\n<tool_call>\n<function=ge", content="a\n"),
    _qwen("cut_in_function", "<tool_call>\n<func"),
    _qwen("no_function", "<tool_call>\nnow()\n</tool_call> x", content="\nnow()\n x"),
    _qwen("no_call", "Use <function=f(x)> or </function>", content="Use <function=f(x)> or </function>"),
]


def _deepseek(version: str, name: str, text: str, *calls: tuple[str, str], content: str = "") -> Case:
    return Case(f"deepseek_{version}", name, text, calls, content)


def _v31(*calls: tuple[str, str]) -> str:
    """Format calls like the model card of DeepSeek-V3.1."""
    parts = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{value}<｜tool▁call▁end｜>" for name, value in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>"


def _v3(*calls: tuple[str, str]) -> str:
    """Format calls like the chat templates of DeepSeek-V3-0324 and DeepSeek-R1."""
    parts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{value}\n```<｜tool▁call▁end｜>"
        for name, value in calls
    ]
    joined = "\n".join(parts)
    return f"<｜tool▁calls▁begin｜>{joined}<｜tool▁calls▁end｜>"


_TWO = (("now", "{}"), ("get_weather", _PARIS))
DEEPSEEK = [
    *(
        case
        for version, write in (("v31", _v31), ("v3", _v3))
        for case in (
            _deepseek(version, "one", write(("get_weather", _PARIS)), ("get_weather", _PARIS)),
            _deepseek(version, "parallel", write(*_TWO), *_TWO),
            _deepseek(version, "nested", write(("run", _NESTED)), ("run", _NESTED)),
            _deepseek(version, "escapes", write(("get_weather", _ESCAPES)), ("get_weather", _ESCAPES)),
            _deepseek(version, "injection", write(("run", _INJECTION)), ("run", _INJECTION)),
            _deepseek(version, "text_before", f"Let me see.\n\n{write(*_TWO)}", *_TWO, content="Let me see."),
            _deepseek(version, "unknown_tool", write(("fly", "{}")), ("fly", "{}")),
            _deepseek(
                version,
                "marks_in_string",
                write(("run", '{"code": "<｜tool▁call▁end｜> ``` {"}')),
                ("run", '{"code": "<｜tool▁call▁end｜> ``` {"}'),
            ),
            _deepseek(version, "cut_in_name", write(*_TWO)[:42], content=write(*_TWO)[39:42]),
            _deepseek(
                version,
                "cut_in_arguments",
                write(("get_weather", _PARIS)).split("Par")[0],
                ("get_weather", '{"city": "'),
            ),
            _deepseek(version, "cut_in_mark", write(*_TWO)[:-8], *_TWO),
            _deepseek(version, "no_call", "Use <｜tool and ```\n{}\n```", content="Use <｜tool and ```\n{}\n```"),
        )
    ),
    _deepseek("v31", "older_form", _v3(*_TWO), *_TWO),
    _deepseek("v3", "newer_form", _v31(*_TWO), *_TWO),
]


def _granite(name: str, text: str, *calls: tuple[str, str], content: str = "") -> Case:
    return Case("granite", name, text, calls, content)


def _listed(*calls: tuple[str, str]) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return f"<|tool_call|>[{', '.join(objects)}]"


GRANITE = [
    _granite("one", _listed(("get_weather", _PARIS)), ("get_weather", _PARIS)),
    _granite("parallel", _listed(*_TWO), *_TWO),
    _granite("spaces", "<|tool_call|> [\n" + _listed(*_TWO).split("[")[1].replace(", {", " ,\n{") + "\n", *_TWO),
    _granite("nested", _listed(("run", _NESTED)), ("run", _NESTED)),
    _granite("escapes", _listed(("get_weather", _ESCAPES)), ("get_weather", _ESCAPES)),
    _granite("text_before", f"Let me see. {_listed(('now', '{}'))}", ("now", "{}"), content="Let me see."),
    _granite("single_object", '<|tool_call|>{"name": "now", "arguments": {}}', ("now", "{}")),
    _granite("no_arguments", '<|tool_call|>[{"name": "now"}]', ("now", "{}")),
    _granite("unknown_tool", _listed(("fly", "{}")), ("fly", "{}")),
    _granite("cut_in_arguments", _listed(("get_weather", _PARIS))[:-6], ("get_weather", '{"city": "Par')),
    _granite("no_list", "<|tool_call|>now()", content="now()"),
    _granite("no_call", "A <|tool| and [1, 2]", content="A <|tool| and [1, 2]"),
]


def _harmony(name: str, text: str, *calls: tuple[str, str], content: str = "") -> Case:
    return Case("harmony", name, text, calls, content)


def _to(name: str, arguments: str) -> str:
    """Format a call like the guide to the harmony format."""
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def _earlier(name: str, arguments: str) -> str:
    """Format a call of an earlier turn like gpt-oss-20b's chat template, which follows `<|start|>assistant`."""
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"


HARMONY = [
    _harmony("one", _to("get_weather", _PARIS), ("get_weather", _PARIS)),
    _harmony("with_end", _to("get_weather", _PARIS) + "<|call|>", ("get_weather", _PARIS)),
    _harmony("earlier_form", _earlier("get_weather", _PARIS), ("get_weather", _PARIS)),
    _harmony("parallel", "<|end|><|start|>assistant".join(_to(*call) for call in _TWO) + "<|call|>", *_TWO),
    _harmony("mixed_forms", _to("now", "{}") + "<|end|><|start|>assistant" + _earlier(*_TWO[1]), *_TWO),
    _harmony("analysis", _to("now", "{}").replace("commentary", "analysis"), ("now", "{}")),
    _harmony("no_constraint", _to("now", "{}").replace(" <|constrain|>json", ""), ("now", "{}")),
    _harmony("no_space", _to("now", "{}").replace(" <|constrain|>", "<|constrain|>"), ("now", "{}")),
    _harmony("code", _to("now", "{}").replace("<|constrain|>json", "code"), ("now", "{}")),
    _harmony("spaces", _to("now", "\n {}\n<|call|>\n"), ("now", "{}")),
    _harmony("nested", _to("run", _NESTED), ("run", _NESTED)),
    _harmony("escapes", _to("get_weather", _ESCAPES), ("get_weather", _ESCAPES)),
    _harmony("injection", _to("run", _INJECTION), ("run", _INJECTION)),
    _harmony("marks_in_string", _to("run", '{"code": "<|call|>{"}'), ("run", '{"code": "<|call|>{"}')),
    _harmony("text_before", "Let me see. " + _to("now", "{}"), ("now", "{}"), content="Let me see."),
    _harmony("unknown_tool", _to("fly", "{}"), ("fly", "{}")),
    _harmony("built_in_tool", _to("x", "{}").replace("functions.x", "python"), ("python", "{}")),
    _harmony("cut_in_arguments", _to("get_weather", _PARIS)[:-6], ("get_weather", '{"city": "P')),
    _harmony("cut_header", _to("now", ""), ("now", "")),
    _harmony("cut_in_name", _to("now", "{}")[:30], content=_to("now", "{}")[:30]),
    _harmony("cut_in_mark", _to("now", "{}") + "<|ca", ("now", "{}")),
    _harmony("no_arguments", _to("now", "now"), content=_to("now", "now")),
    _harmony("no_call", "A <|channel and to=functions.x", content="A <|channel and to=functions.x"),
    _harmony("no_recipient", " to=functions.", content=" to=functions."),
]


def _phi4(name: str, text: str, *calls: tuple[str, str], content: str = "") -> Case:
    return Case("phi4_mini", name, text, calls, content)


PHI4_MINI = [
    _phi4("one", _listed(_TWO[1]) + "<|/tool_call|>", _TWO[1]),
    _phi4("parallel", _listed(*_TWO) + "<|/tool_call|>", *_TWO),
    _phi4("no_end", _listed(*_TWO), *_TWO),
    _phi4("nested", _listed(("run", _NESTED)) + "<|/tool_call|>", ("run", _NESTED)),
    _phi4("text_around", f"So. {_listed(_TWO[0])}<|/tool_call|> Ok.", _TWO[0], content="So. Ok."),
    _phi4("single_object", '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>', ("now", "{}")),
    _phi4("cut_in_arguments", _listed(_TWO[1])[:-6], ("get_weather", '{"city": "Par')),
    _phi4("cut_in_mark", _listed(*_TWO) + "<|/tool", *_TWO),
    _phi4("no_call", "A <|tool| and [1, 2]", content="A <|tool| and [1, 2]"),
]


def _python(name: str, text: str, *calls: tuple[str, str], content: str = "") -> Case:
    return Case("pythonic", name, text, calls, content)


PYTHONIC = [
    _python("one", '[get_weather(city="Paris")]', ("get_weather", _PARIS)),
    _python("single_quotes", "[get_weather(city='Paris')]", ("get_weather", _PARIS)),
    _python("no_arguments", "[now()]", ("now", "{}")),
    _python("parallel", "[now(), get_weather(city='Paris')]", *_TWO),
    _python("marks", "<|python_start|>[now()]<|python_end|>", ("now", "{}")),
    _python("spaces", " [ now ( ) , \n get_weather( city = 'Paris' , ) ]\n", *_TWO),
    _python("numbers", "[set(n=5, x=-1.50e3, id='1a')]", ("set", '{"n": 5, "x": -1.50e3, "id": "1a"}')),
    _python("names", "[set(on=True, note=None)]", ("set", '{"on": true, "note": null}')),
    _python("json_names", "[set(on=false, note=null)]", ("set", '{"on": false, "note": null}')),
    _python("word", "[get_weather(city=Paris)]", ("get_weather", _PARIS)),
    _python("no_json_number", "[set(n=0x1F, x=.5)]", ("set", '{"n": "0x1F", "x": ".5"}')),
    _python(
        "nested",
        "[run(options={'a': [1, (2, 'b',), {}], 3: {\"c\": None, True: []}, }, code='x')]",
        ("run", '{"options": {"a": [1, [2, "b"], {}], "3": {"c": null, "True": []}}, "code": "x"}'),
    ),
    _python(
        "escapes",
        r"""[run(code='it\'s "\n\t\\\x41\u00e9\ud83d\ude00\U0001f600\q\xz')]""",
        ("run", r"""{"code": "it's \"\n\t\\\u0041\u00e9\ud83d\ude00\ud83d\ude00\\q\\xz"}"""),
    ),
    _python("brackets_in_string", "[run(code=')], [now()]')]", ("run", '{"code": ")], [now()]"}')),
    _python("twice", "[run(code='a', code='b')]", ("run", '{"code": "a"}')),
    _python("injection", "[run(code=__import__('os'))]", ("run", '{"code": "__import__"'), content="('os'))]"),
    _python("text_before", "Let me see. [now()]", ("now", "{}"), content="Let me see."),
    _python("unknown_tool", "[fly()]", content="[fly()]"),
    _python("unknown_marked_tool", "<|python_start|>[fly(a=1)]", ("fly", '{"a": 1}')),
    _python("positional", "[get_weather('Paris')]", content="[get_weather('Paris')]"),
    _python("missing_bracket", "[now()", ("now", "{}")),
    _python("wrong_bracket", "[run(options={'a': [1}])]", ("run", '{"options": {"a": [1'), content="}])]"),
    _python("cut_in_text", "[run(code='x \"", ("run", '{"code": "x \\"')),
    _python("cut_in_escape", "[run(code='x\\u00", ("run", '{"code": "x')),
    _python("cut_in_number", "[set(n=12", ("set", '{"n": 12')),
    _python("cut_in_key", "[set(n", content="[set(n"),
    _python("cut_in_list", "[run(options=[1, 'a', ", ("run", '{"options": [1, "a"')),
    _python("no_call", "See [1], [a, b] and now().", content="See [1], [a, b] and now()."),
]

_LISTED_MARKS = {"jamba": ("<tool_calls>", "</tool_calls>"), "nemotron": ("<TOOLCALL>", "</TOOLCALL>")}
_ONE, _BOTH = (("now", "{}"),), (("now", "{}"), ("get_weather", _PARIS))
LISTED = [
    Case(name, kind, text.format(open=marks[0], close=marks[1]), calls, content)
    for name, marks in _LISTED_MARKS.items()
    for kind, text, calls, content in (
        ("one", '{open}[{{"name": "now", "arguments": {{}}}}]{close}', _ONE, ""),
        ("lines", '{open}[\n{{"name": "now", "arguments": {{}}}}\n]{close}', _ONE, ""),
        (
            "parallel",
            'See. {open}[{{"name": "now", "arguments": {{}}}}, '
            '{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}]{close}',
            _BOTH,
            "See.",
        ),
        ("broken", "{open}[1]{close}", (), "[1]"),
    )
]
COHERE = [
    Case("cohere", kind, text, calls, content)
    for kind, text, calls, content in (
        (
            "one",
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
            _ONE,
            "",
        ),
        (
            "parallel",
            'I look.<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}, '
            f'{{"tool_call_id": "1", "tool_name": "get_weather", "parameters": {_PARIS}}}]<|END_ACTION|>',
            _BOTH,
            "I look.",
        ),
    )
]
_KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_K2 = [
    Case("kimi_k2", kind, text, calls, content)
    for kind, text, calls, content in (
        ("one", _KIMI_SECTION.format(_KIMI.format("now", 0, "{}")), _ONE, ""),
        ("no_number", _KIMI_SECTION.format(_KIMI.format("now", 0, "{}").replace(":0", "")), _ONE, ""),
        (
            "parallel",
            "Wait. " + _KIMI_SECTION.format(_KIMI.format("now", 0, "{}") + _KIMI.format("get_weather", 1, _PARIS)),
            _BOTH,
            "Wait.",
        ),
    )
]
LFM2 = [
    Case("lfm2", kind, text, calls, content)
    for kind, text, calls, content in (
        ("one", "<|tool_call_start|>[now()]<|tool_call_end|>", _ONE, ""),
        ("parallel", 'See.<|tool_call_start|>[now(), get_weather(city="Paris")]<|tool_call_end|>', _BOTH, "See."),
        ("no_marks", "See [now()].", (), "See [now()]."),
    )
]

_TWO_LINES = 'now()\nget_weather(city="Paris")'
_PLUGIN = '<|action_start|><|plugin|>\n{{"name": "{}", "parameters": {}}}<|action_end|>'
_FUNCTION = '<function_call> {{"name": "{}", "arguments": {}}}'
FURTHER = [
    Case(name, kind, text, calls, content)
    for name, kind, text, calls, content in (
        ("apertus", "one", '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>', _ONE, ""),
        (
            "apertus",
            "parallel",
            f'I look.<|tools_prefix|>[{{"now": {{}}}}, {{"get_weather": {_PARIS}}}]<|tools_suffix|>',
            _BOTH,
            "I look.",
        ),
        ("apertus", "nested", f'<|tools_prefix|>[{{"run": {_NESTED}}}]<|tools_suffix|>', (("run", _NESTED),), ""),
        ("apertus", "cut", '<|tools_prefix|>[{"get_weather": {"city": "Par', (("get_weather", '{"city": "Par'),), ""),
        ("apertus", "broken", "<|tools_prefix|>[1]<|tools_suffix|>", (), "[1]"),
        ("internlm2", "one", _PLUGIN.format("now", "{}"), _ONE, ""),
        (
            "internlm2",
            "parallel",
            "See. " + _PLUGIN.format("now", "{}") + _PLUGIN.format("get_weather", _PARIS),
            _BOTH,
            "See.",
        ),
        ("internlm2", "other_action", "<|action_start|><|interpreter|>x", (), "<|action_start|><|interpreter|>x"),
        ("granite_functions", "one", _FUNCTION.format("now", "{}"), _ONE, ""),
        (
            "granite_functions",
            "parallel",
            _FUNCTION.format("now", "{}") + "\n" + _FUNCTION.format("get_weather", _PARIS),
            _BOTH,
            "",
        ),
        ("olmo3", "one", "<function_calls>now()</function_calls>", _ONE, ""),
        ("olmo3", "parallel", f"See.\n<function_calls>\n{_TWO_LINES}\n</function_calls>", _BOTH, "See."),
        ("olmo3", "cut", "<function_calls>get_weather(city='Par", (("get_weather", '{"city": "Par'),), ""),
        ("olmo3", "no_marks", "See now().", (), "See now()."),
        ("minicpm3", "one", "<|tool_call_start|>\n```python\nnow()\n```\n<|tool_call_end|>\n", _ONE, ""),
        (
            "minicpm3",
            "parallel",
            f"<|tool_call_start|>\n```python\n{_TWO_LINES}\n```\n<|tool_call_end|>\nI look.",
            _BOTH,
            "I look.",
        ),
        ("minicpm3", "no_fence", "<|tool_call_start|>now()", (), "<|tool_call_start|>now()"),
    )
]

CASES = [
    *FURTHER,
    *LISTED,
    *COHERE,
    *KIMI_K2,
    *LFM2,
    *(Case(*row) for row in LATER),
    *(Case("glm45", *row) for row in GLM45),
    *(Case("minimax_m2", *row) for row in MINIMAX_M2),
    *(Case("seed_oss", *row) for row in SEED_OSS),
    *PHI4_MINI,
    *PYTHONIC,
    *DEEPSEEK,
    *GRANITE,
    *HARMONY,
    *HERMES,
    *LLAMA,
    *MISTRAL,
    *FUNCTIONARY,
    *GEMMA,
    *QWEN3_CODER,
]
