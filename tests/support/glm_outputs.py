"""Answers of GLM 4.5 with tool calls, for `tool_outputs.CASES`: the text, the calls and the content."""

from __future__ import annotations


def glm_call(name: str, *parameters: tuple[str, str]) -> str:
    """Format a call like the chat template of GLM-4.5."""
    lines = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parameters)
    return f"<tool_call>{name}\n{lines}</tool_call>"


_PARIS = '{"city": "Paris"}'
_Row = tuple[str, str, tuple[tuple[str, str], ...], str]
GLM45: list[_Row] = [
    ("one", glm_call("get_weather", ("city", "Paris")), (("get_weather", _PARIS),), ""),
    ("no_parameters", glm_call("now"), (("now", "{}"),), ""),
    ("parallel", f"{glm_call('now')}\n{glm_call('run', ('code', '1'))}", (("now", "{}"), ("run", '{"code": "1"}')), ""),
    ("text_around", f"Hm.\n\n{glm_call('now')}\nSo.", (("now", "{}"),), "Hm.\n\nSo."),
    ("tight", glm_call("get_weather", ("city", "Paris")).replace("\n", ""), (("get_weather", _PARIS),), ""),
    ("lines", glm_call("run", ("code", "\nif x:\n\ty\n")), (("run", '{"code": "\\nif x:\\n\\ty\\n"}'),), ""),
    (
        "types",
        glm_call("set", ("n", "5"), ("s", "7"), ("on", "true")),
        (("set", '{"n": 5, "s": "7", "on": true}'),),
        "",
    ),
    ("object", glm_call("run", ("options", '{"a": [1,\n2]}')), (("run", '{"options": {"a": [1,\n2]}}'),), ""),
    ("twice", glm_call("run", ("code", "a"), ("code", "b")), (("run", '{"code": "a"}'),), ""),
    ("unknown_tool", glm_call("fly", ("a", "1")), (("fly", '{"a": 1}'),), ""),
    (
        "tags_in_text",
        glm_call("run", ("code", "<b></arg_value> </a>")),
        (("run", '{"code": "<b></arg_value> </a>"}'),),
        "",
    ),
    ("cut_in_text", '<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>x "', (("run", '{"code": "x \\"'),), ""),
    ("cut_in_number", "<tool_call>set\n<arg_key>n</arg_key>\n<arg_value>12", (("set", '{"n": 12'),), ""),
    ("cut_in_key", "<tool_call>run\n<arg_key>co", (("run", ""),), ""),
    ("cut_in_name", "a\n<tool_call>ge", (), "a\nge"),
    ("no_call", "Use <tool_call> x y </tool_call>", (), "Use  x y "),
]
