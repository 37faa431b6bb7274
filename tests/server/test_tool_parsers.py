"""Tool calls in answers: every format, cut at every place, in time linear in the length."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.outputs import CompletionOutput
from octavo.server.generation.events import ChoiceReader, ToolCallDelta
from octavo.server.reasoning.formats import harmony
from octavo.server.tool_parsers.answer import CallArguments, CallStart, ParsedPart
from octavo.server.tool_parsers.tool_format import ToolParser, tool_formats
from tests.support.tool_outputs import CASES, TOOLS, Case

Folded = tuple[str, tuple[tuple[str, str], ...]]


def parse(format_name: str, pieces: list[str]) -> list[ParsedPart]:
    parser = ToolParser(tool_formats()[format_name], TOOLS)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return parts + parser.finish()


def fold(parts: list[ParsedPart]) -> Folded:
    content, calls = "", []
    for part in parts:
        if isinstance(part, str):
            content += part
        elif isinstance(part, CallStart):
            calls.append([part.name, ""])
        else:
            calls[-1][1] += part.text
    return content, tuple((name, arguments) for name, arguments in calls)


def in_order(parts: list[ParsedPart]) -> list[object]:
    """The parts with neighbours of one kind joined: what must not depend on the cuts."""
    joined: list[object] = []
    for kind, group in itertools.groupby(parts, key=type):
        members = list(group)
        texts = [part if isinstance(part, str) else part.text for part in members if not isinstance(part, CallStart)]
        joined += members if kind is CallStart else ["".join(texts)]
    return joined


def case_id(case: Case) -> str:
    return f"{case.format}-{case.name}"


def test_every_format_is_covered() -> None:
    assert {case.format for case in CASES} == set(tool_formats())
    assert len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_whole_answers(case: Case) -> None:
    assert fold(parse(case.format, [case.text])) == (case.content, case.calls)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_pieces_of_one_character(case: Case) -> None:
    whole = parse(case.format, [case.text])
    assert in_order(parse(case.format, list(case.text))) == in_order(whole)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_single_cut(case: Case) -> None:
    whole = in_order(parse(case.format, [case.text]))
    for cut in range(len(case.text) + 1):
        assert in_order(parse(case.format, [case.text[:cut], case.text[cut:]])) == whole


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_random_cuts_of_mixed_answers(data: st.DataObject) -> None:
    format_name = data.draw(st.sampled_from(sorted(tool_formats())))
    texts = st.sampled_from([case.text for case in CASES])
    text = "".join(data.draw(st.lists(texts, min_size=1, max_size=3)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert in_order(parse(format_name, pieces)) == in_order(parse(format_name, [text]))


@given(text=st.text(alphabet='<>{}[]"\\\\:,;`/ \\n|=_tolcanmergusfji', max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_text_gives_the_same_whatever_the_pieces(text: str) -> None:
    for name in tool_formats():
        assert in_order(parse(name, list(text))) == in_order(parse(name, [text]))


@pytest.mark.parametrize("name", sorted(tool_formats()))
@given(text=st.text(alphabet="abc XYZ.,!?()é😀\n\t", max_size=60))
@settings(max_examples=50, deadline=None)
def test_plain_text_passes_unchanged(name: str, text: str) -> None:
    assert fold(parse(name, [text])) == (text, ())


@pytest.mark.parametrize("case", [case for case in CASES if "get_weather" in case.text], ids=case_id)
def test_names_of_200_characters(case: Case) -> None:
    """The longest that Anthropic's clients send, such as those of tools of plugins."""
    name = "mcp__plugin_a-b_c__" + "x" * 181
    tools = json.loads(json.dumps(TOOLS).replace("get_weather", name))
    reasoning = harmony.FORMAT.create_parser("") if case.format == "harmony" else None
    reader = ChoiceReader(0, ToolParser(tool_formats()[case.format], tools), reasoning)
    text = case.text.replace("get_weather", name)
    events = reader.push(CompletionOutput(0, text, [], finish_reason="stop"))
    names = [event.name for event in events if isinstance(event, ToolCallDelta) and event.name]
    assert names == [called.replace("get_weather", name) for called, _ in case.calls]


# What was cut where it could still have become something else.
UNDECIDED = ("cut_header", "cut_in_number", "cut_behind_end")


@pytest.mark.parametrize("case", [case for case in CASES if case.calls and case.name not in UNDECIDED], ids=case_id)
def test_everything_is_out_before_the_end(case: Case) -> None:
    """Nothing of a call waits for the end of the answer."""
    parser = ToolParser(tool_formats()[case.format], TOOLS)
    seen: list[ParsedPart] = []
    for char in case.text:
        seen += parser.push(char)
    assert fold(seen)[1] == case.calls


def test_the_name_comes_before_the_arguments_are_complete() -> None:
    parser = ToolParser(tool_formats()["hermes"], TOOLS)
    parts = parser.push('<tool_call>\n{"name": "run", "arguments": {"code": "pri')
    assert parts == [CallStart("run"), CallArguments('{"code": "pri')]
    assert parser.push("nt") == [CallArguments("nt")]


def test_text_of_a_parameter_comes_as_json_while_it_is_written() -> None:
    parser = ToolParser(tool_formats()["qwen3_coder"], TOOLS)
    parts = parser.push('<tool_call>\n<function=run>\n<parameter=code>\nprint("')
    assert parts == [CallStart("run"), CallArguments('{"code": "print(\\"')]
    assert parser.push("a\n") == [CallArguments("a")]
    assert parser.push("b\n</") == [CallArguments("\\nb")]
    assert parser.push("b>") == [CallArguments("\\n</b>")]


def test_types_of_parameters_are_found_through_references() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"allOf": [{"$ref": "#/$defs/b~1c"}]}},
        "additionalProperties": {"type": "string"},
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}, "b/c": {"const": 3}},
    }
    parser = ToolParser(tool_formats()["qwen3_coder"], [{"function": {"name": "f", "parameters": schema}}])
    text = "<function=f>" + "".join(f"<parameter={key}>3</parameter>" for key in "abc") + "</function>"
    assert fold(parser.push(text)) == ("", (("f", '{"a": "3", "b": 3, "c": "3"}'),))


_DSML_TEXT = '<｜DSML｜invoke name="run"><｜DSML｜parameter name="code" string="true">'


def _long_texts(size: int) -> dict[str, tuple[str, str]]:
    return {
        "arguments": ("hermes", '<tool_call>{"name": "run", "arguments": {"code": "' + "x" * size + '"}}</tool_call>'),
        "escapes": ("hermes", '<tool_call>{"name": "run", "arguments": "' + "\\ud83d" * (size // 6)),
        "nesting": ("hermes", '<tool_call>{"name": "run", "arguments": ' + "[" * size),
        "braces": ("llama3_json", "{" * size),
        "objects": ("llama3_json", '{"name": ' * (size // 9)),
        "other_objects": ("llama3_json", '{"a": ' * (size // 6)),
        "open_tags": ("hermes", "<tool_call>" * (size // 11)),
        "half_tags": ("hermes", "<tool_call" * (size // 10)),
        "white_space": ("hermes", " " * size),
        "name": ("hermes", '<tool_call>{"name": "' + "a" * size),
        "unnamed": ("hermes", '<tool_call>{"arguments": {"code": "' + "x" * size),
        "fences": ("gemma", "```json\n" * (size // 8)),
        "fence_head": ("gemma", "```json\n" + " " * size + "{"),
        "functions": ("functionary", "<function=a" * (size // 11)),
        "recipients": ("functionary_recipients", ">>>a\n" * (size // 5)),
        "headers": ("mistral", "[TOOL_CALLS]a" * (size // 13)),
        "values": ("qwen3_coder", "<function=run><parameter=code>" + "</parameter> " * (size // 13)),
        "value_spaces": ("qwen3_coder", "<function=run><parameter=code></parameter>" + " " * size + "x"),
        "value_lines": ("qwen3_coder", "<function=run><parameter=code>" + "\n" * size),
        "parameters": ("qwen3_coder", "<function=run>" + "<parameter=a>b</parameter>" * (size // 26)),
        "keys": ("qwen3_coder", "<function=run><parameter=" + "a" * size),
        "json_value": ("qwen3_coder", "<function=run><parameter=options>" + "[" * size + "</parameter></function>"),
        "digits": ("qwen3_coder", "<function=set><parameter=n>" + "9" * size + "</parameter></function>"),
        "glm_keys": ("glm45", "<tool_call>run<arg_key>" + "a" * size),
        "glm_values": ("glm45", "<tool_call>run<arg_key>code</arg_key><arg_value>" + "</arg_value> " * (size // 13)),
        "dsml_values": ("deepseek_v32", _DSML_TEXT + "</｜DSML｜parameter> " * (size // 19)),
        "dsml_types": ("deepseek_v32", _DSML_TEXT.replace("true", "tru") * (size // 80)),
        "gemma4_texts": ("gemma4", '<|tool_call>call:run{code:<|"|>' + '<|"' * (size // 3)),
        "gemma4_depth": ("gemma4", "<|tool_call>call:run{options:" + "{a:[" * (size // 4)),
        "brackets": ("pythonic", "[" * size),
        "python_names": ("pythonic", "[now()" + ", now()" * (size // 7)),
        "python_depth": ("pythonic", "[run(code=" + "[" * size),
        "python_dicts": ("pythonic", "[run(code=" + "{'a': " * (size // 6)),
        "python_text": ("pythonic", "[run(code='" + "x" * size),
        "python_word": ("pythonic", "[run(code=" + "9" * size),
        "commas": ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}' + ", " * (size // 2)),
    }


def _seconds(format_name: str, pieces: list[str]) -> float:
    started = time.process_time()
    parse(format_name, pieces)
    return time.process_time() - started


@pytest.mark.parametrize("shape", sorted(_long_texts(0)))
def test_time_is_linear_in_the_length(shape: str) -> None:
    """A hundred kilobytes at once, and as many characters one by one as a long answer has."""
    assert _seconds(*_whole(_long_texts(100_000)[shape])) < 8.0
    assert _seconds(*_characters(_long_texts(10_000)[shape])) < 8.0


@pytest.mark.slow
@pytest.mark.parametrize("shape", sorted(_long_texts(0)))
def test_time_of_single_characters_is_linear_too(shape: str) -> None:
    short, long = (_seconds(*_characters(_long_texts(size)[shape])) for size in (20_000, 160_000))
    assert long < 16 * short + 0.5


def _whole(case: tuple[str, str]) -> tuple[str, list[str]]:
    return case[0], [case[1]]


def _characters(case: tuple[str, str]) -> tuple[str, list[str]]:
    return case[0], list(case[1])


def test_valid_arguments_stay_valid_and_unchanged() -> None:
    arguments = json.dumps({"code": "é😀\u2028</tool_call>" * 50, "options": {"a": [1, {"b": None}] * 20}}, indent=3)
    text = f'<tool_call>{{"name": "run", "arguments": {arguments}}}</tool_call>'
    assert fold(parse("hermes", list(text))) == ("", (("run", arguments),))


def test_white_space_before_a_call_that_was_cut_off_is_dropped() -> None:
    assert fold(parse("functionary", ["Hm.\n<function=now>"])) == ("Hm.", (("now", ""),))


def test_half_a_surrogate_pair_in_a_name_can_be_encoded() -> None:
    text = '<tool_call>{"name": "a\\ud83d", "arguments": {}}</tool_call>'
    assert fold(parse("hermes", list(text))) == ("", (("a\ufffd", "{}"),))


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda items: st.lists(items, max_size=4) | st.dictionaries(st.text(), items, max_size=4),
        max_leaves=12,
    )
)
@settings(max_examples=300, deadline=None)
def test_what_python_itself_writes_is_read_as_json(value: object) -> None:
    """`repr` and `json` of Python's own library are the judges."""
    content, [(_, arguments)] = fold(parse("pythonic", list(f"[run(options={value!r})]")))
    assert content == ""
    assert json.loads(arguments) == {"options": value}
