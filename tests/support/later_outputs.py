"""Answers with tool calls of the formats that were added last, for `tool_outputs.CASES`.

A row has the format, a name, the text, the calls and the content.
"""

from __future__ import annotations

_Row = tuple[str, str, str, tuple[tuple[str, str], ...], str]
_PARIS = '{"city": "Paris"}'
_NOW, _WEATHER = ("now", "{}"), ("get_weather", _PARIS)


def dsml_invoke(name: str, *parameters: tuple[str, str, bool]) -> str:
    """An invocation as `encoding_dsv32.py` writes it.

    parameters: key, value, and whether it is text.
    """
    lines = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if is_text else "false"}">{value}</｜DSML｜parameter>\n'
        for key, value, is_text in parameters
    )
    return f'<｜DSML｜invoke name="{name}">\n{lines}</｜DSML｜invoke>\n'


def dsml(*invocations: str) -> str:
    """All calls of an answer."""
    return f"<｜DSML｜function_calls>\n{''.join(invocations)}</｜DSML｜function_calls>"


_CITY = ("city", "Paris", True)
_SET = dsml_invoke("set", ("n", "5", False), ("s", "7", True), ("on", "true", False), ("note", "null", True))
_DEEPSEEK_V32: list[tuple[str, str, tuple[tuple[str, str], ...], str]] = [
    ("one", dsml(dsml_invoke("get_weather", _CITY)), (_WEATHER,), ""),
    ("parallel", dsml(dsml_invoke("now"), dsml_invoke("get_weather", _CITY)), (_NOW, _WEATHER), ""),
    ("text_around", f"Hm.\n\n{dsml(dsml_invoke('now'))}\nSo.", (_NOW,), "Hm.\n\nSo."),
    ("types", dsml(_SET), (("set", '{"n": 5, "s": "7", "on": true, "note": "null"}'),), ""),
    ("text_of_a_number", dsml(dsml_invoke("set", ("n", "5", True))), (("set", '{"n": "5"}'),), ""),
    ("no_json", dsml(dsml_invoke("set", ("n", "five", False))), (("set", '{"n": "five"}'),), ""),
    ("json_text", dsml(dsml_invoke("run", ("code", '"a"', False))), (("run", '{"code": "a"}'),), ""),
    (
        "object",
        dsml(dsml_invoke("run", ("options", '{"a": [1, null]}', False))),
        (("run", '{"options": {"a": [1, null]}}'),),
        "",
    ),
    ("no_type", dsml(dsml_invoke("set", ("n", "5", True))).replace(' string="true"', ""), (("set", '{"n": 5}'),), ""),
    ("twice", dsml(dsml_invoke("run", ("code", "a", True), ("code", "b", True))), (("run", '{"code": "a"}'),), ""),
    ("unknown_tool", dsml(dsml_invoke("fly", ("a", "1", False))), (("fly", '{"a": 1}'),), ""),
    (
        "tags_in_text",
        dsml(dsml_invoke("run", ("code", "</｜DSML｜parameter> <b></｜DSML｜invoke>x", True))),
        (("run", '{"code": "</｜DSML｜parameter> <b></｜DSML｜invoke>x"}'),),
        "",
    ),
    ("no_outer_tag", dsml_invoke("now"), (_NOW,), ""),
    (
        "wrong_type",
        '<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="a" string="x">b',
        (_NOW,),
        '<｜DSML｜parameter name="a" string="x">b',
    ),
    ("cut_in_text", dsml(dsml_invoke("get_weather", _CITY)).split("ris")[0], (("get_weather", '{"city": "Pa'),), ""),
    ("cut_in_number", dsml(_SET).split("</")[0], (("set", '{"n": 5'),), ""),
    ("cut_in_type", dsml(_SET).split('="false')[0], (("set", ""),), ""),
    ("cut_in_name", "a " + dsml(dsml_invoke("get_weather")).split("_weather")[0], (), "a "),
    ("no_call", "Use <｜DSML｜ and <function_calls>", (), "Use <｜DSML｜ and <function_calls>"),
]


def gemma4_call(name: str, arguments: str) -> str:
    """A call as Gemma 4's template writes it.

    arguments: without the braces.
    """
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


_GEMMA4_CITY = 'city:<|"|>Paris<|"|>'
_GEMMA4: list[tuple[str, str, tuple[tuple[str, str], ...], str]] = [
    ("one", gemma4_call("get_weather", _GEMMA4_CITY), (_WEATHER,), ""),
    ("no_parameters", gemma4_call("now", ""), (_NOW,), ""),
    ("parallel", gemma4_call("now", "") + gemma4_call("get_weather", _GEMMA4_CITY), (_NOW, _WEATHER), ""),
    ("text_around", f"Hm.\n{gemma4_call('now', '')}\nSo.", (_NOW,), "Hm.\nSo."),
    (
        "types",
        gemma4_call("set", 'n:5,x:-1.5e3,s:<|"|>7<|"|>,on:true,note:null'),
        (("set", '{"n": 5, "x": -1.5e3, "s": "7", "on": true, "note": null}'),),
        "",
    ),
    (
        "nested",
        gemma4_call("run", 'options:{a:[1,<|"|>b<|"|>,{}],c-d:{e:false}}'),
        (("run", '{"options": {"a": [1, "b", {}], "c-d": {"e": false}}}'),),
        "",
    ),
    (
        "text_as_it_is",
        gemma4_call("run", 'code:<|"|>if "a\\n" < \'b\':\n\t{x}, <tool_call|> <|"<|"|>'),
        (("run", '{"code": "if \\"a\\\\n\\" < \'b\':\\n\\t{x}, <tool_call|> <|\\""}'),),
        "",
    ),
    (
        "json",
        gemma4_call("run", 'options: {"a": "b\\n"}, code: "c"'),
        (("run", '{"options": {"a": "b\\n"}, "code": "c"}'),),
        "",
    ),
    ("quoted_keys", gemma4_call("run", 'options:{<|"|>a b<|"|>:1}'), (("run", '{"options": {"a b": 1}}'),), ""),
    ("twice", gemma4_call("run", 'code:<|"|>a<|"|>,code:<|"|>b<|"|>'), (("run", '{"code": "a"}'),), ""),
    ("unknown_tool", gemma4_call("fly", "a:1"), (("fly", '{"a": 1}'),), ""),
    ("no_end", "<|tool_call>call:now{}", (_NOW,), ""),
    ("broken", gemma4_call("run", "code:<b>"), (("run", '{"code": '),), "<b>}"),
    ("wrong_bracket", gemma4_call("run", "options:{a:[1}"), (("run", '{"options": {"a": [1'),), "}}"),
    ("cut_in_text", '<|tool_call>call:run{code:<|"|>x <|"', (("run", '{"code": "x '),), ""),
    ("cut_in_number", "<|tool_call>call:set{n:12", (("set", '{"n": 12'),), ""),
    ("cut_in_key", "<|tool_call>call:set{n", (), "call:set{n"),
    ("cut_in_name", "a <|tool_call>call:se", (), "a call:se"),
    ("no_name", "<|tool_call>call:{}<tool_call|>", (), "call:{}"),
    ("no_call", 'Use <|tool and call:now{} and <|"|>', (), 'Use <|tool and call:now{} and <|"|>'),
]


def actions(*calls: tuple[str, str]) -> str:
    """A list of calls as Command R writes it."""
    items = [
        f'{{\n        "tool_name": "{name}",\n        "parameters": {arguments}\n    }}' for name, arguments in calls
    ]
    return "Action: ```json\n[\n    " + ",\n    ".join(items) + "\n]\n```"


_NO_CALL = actions(("directly-answer", "{}"))
_COMMAND_R: list[tuple[str, str, tuple[tuple[str, str], ...], str]] = [
    ("one", actions(_WEATHER), (_WEATHER,), ""),
    ("parallel", f"Plan: look.\n{actions(_NOW, _WEATHER)}\n", (_NOW, _WEATHER), "Plan: look."),
    ("line_break", actions(_NOW).replace("Action: ", "Action:\n"), (_NOW,), ""),
    ("no_fence", 'Action: [{"tool_name": "now", "parameters": {}}]', (_NOW,), ""),
    ("unknown_tool", actions(("fly", '{"a": 1}')), (("fly", '{"a": 1}'),), ""),
    ("no_tool_needed", _NO_CALL, (), ""),
    ("no_tool_needed_and_text", f"{_NO_CALL}\n\nFour.", (), "\n\nFour."),
    ("no_tool_needed_and_a_call", actions(("directly_answer", "{}"), _NOW), (_NOW,), ""),
    ("cut_in_arguments", actions(_WEATHER).split("ris")[0], (("get_weather", '{"city": "Pa'),), ""),
    ("cut_in_name", actions(_WEATHER).split("_weather")[0], (), actions(_WEATHER).split("_weather")[0]),
    ("no_name", "Action: ```json\n[1]\n```", (), "Action: ```json\n[1]\n```"),
    ("no_call", "Action: run ```json {}```", (), "Action: run ```json {}```"),
]
_MINI = '<toolcall> {{"name": "{}", "arguments": {}}} </toolcall>'
_NEMOTRON_MINI: list[tuple[str, str, tuple[tuple[str, str], ...], str]] = [
    ("one", _MINI.format(*_WEATHER), (_WEATHER,), ""),
    ("parallel", f"See. {_MINI.format(*_NOW)} {_MINI.format(*_WEATHER)} ", (_NOW, _WEATHER), "See."),
    (
        "several_in_one",
        '<toolcall> {"name": "now"}, {"name": "get_weather", "arguments": {"city": "Paris"}} </toolcall>',
        (_NOW, _WEATHER),
        "",
    ),
    ("unknown_tool", _MINI.format("fly", "{}"), (("fly", "{}"),), ""),
    ("cut_in_arguments", _MINI.format(*_WEATHER)[:-19], (("get_weather", '{"city": "P'),), ""),
    ("no_call", "<toolcall> now() </toolcall> x", (), " now()  x"),
]
_GLM4: list[tuple[str, str, tuple[tuple[str, str], ...], str]] = [
    ("one", f"get_weather\n{_PARIS}", (_WEATHER,), ""),
    ("line_break_before", f"\nget_weather\n{_PARIS}<|observation|>", (_WEATHER,), ""),
    ("parallel", f"now\n{{}}<|assistant|>get_weather\n{_PARIS}", (_NOW, _WEATHER), ""),
    ("text_before", f"See.<|assistant|>get_weather\n{_PARIS}", (_WEATHER,), "See."),
    ("unknown_marked_tool", "See.<|assistant|>fly\n{}", (("fly", "{}"),), "See."),
    ("unknown_tool", "fly\n{}", (), "fly\n{}"),
    ("later_line", "See:\nnow\n{}", (), "See:\nnow\n{}"),
    ("only_a_name", "now\n", (), "now\n"),
    ("no_arguments", "now\nor never", (), "now\nor never"),
    ("cut_in_arguments", 'get_weather\n{"city": "Pa', (("get_weather", '{"city": "Pa'),), ""),
    ("cut_in_name", "get_wea", (), "get_wea"),
]

LATER: list[_Row] = [
    *(("deepseek_v32", *row) for row in _DEEPSEEK_V32),
    *(("gemma4", *row) for row in _GEMMA4),
    *(("command_r", *row) for row in _COMMAND_R),
    *(("nemotron_mini", *row) for row in _NEMOTRON_MINI),
    *(("glm4", *row) for row in _GLM4),
]
