"""Grammars that force tool calls, over the vocabulary of a real model."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.engine.texts.constrained import GrammarCompiler
from octavo.errors import UsageError
from octavo.loader.checkpoint import open_checkpoint
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.generation.json_schema import check_tools
from octavo.server.tool_parsers.answer import CallArguments, CallStart, Tool
from octavo.server.tool_parsers.tool_format import ToolParser, tool_formats
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.describing_schemas import DESCRIBING
from tests.support.glm_outputs import glm_call
from tests.support.later_outputs import actions, dsml, dsml_invoke, gemma4_call
from tests.support.realistic_tools import realistic_tools
from tests.support.tool_outputs import TOOLS, tool

FORMATS = sorted(tool_formats())
STRICT = {
    "type": "function",
    "function": {
        "name": "book",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "seats": {"type": "integer", "minimum": 1, "maximum": 9},
                "class": {"enum": ["first", "second"]},
                "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
            },
            "required": ["seats", "class"],
            "additionalProperties": False,
            "$defs": {"stop": {"type": "string", "maxLength": 8}},
        },
    },
}


class Compiled:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
        is_mark = [bool(set(tokenizer.token_bytes(i)) & set(b'"}]>')) for i in range(tokenizer.vocab_size)]
        self._is_mark = np.array(is_mark)

    def start(self, format_name: str, tools: list[Tool], parallel: bool = False) -> Any:
        return self.start_grammar(tool_formats()[format_name].grammar(tools, parallel, {}))

    def start_grammar(self, grammar: str) -> Any:
        return self._compiler.compile(StructuredOutputsParams(grammar=grammar)).copy().matcher

    def accepts(self, format_name: str, tools: list[Tool], text: str, parallel: bool = False) -> bool:
        return self.is_whole(self.start(format_name, tools, parallel), text)

    def is_whole(self, matcher: Any, text: str) -> bool:
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def random_answer(self, format_name: str, tools: list[Tool], seed: int, max_tokens: int = 120) -> tuple[str, bool]:
        """An answer that the grammar allows, and whether it is complete; every other token may end something."""
        matcher, rng = self.start(format_name, tools, parallel=True), np.random.default_rng(seed)
        token_ids: list[int] = []
        while len(token_ids) < max_tokens:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            bits = bits[: len(self._is_mark)] > 0
            bits[list(self.tokenizer.eos_token_ids)] = False
            allowed, marks = np.flatnonzero(bits), np.flatnonzero(bits & self._is_mark)
            if not allowed.size or (matcher.is_accepting() and rng.random() < 0.3):
                break
            token_ids.append(int(rng.choice(marks if marks.size and rng.random() < 0.5 else allowed)))
            matcher.consume_token(token_ids[-1])
        return self.tokenizer.decode(token_ids, skip_special_tokens=False), matcher.is_accepting()


@pytest.fixture(scope="module")
def compiled(smollm2_path: Path) -> Compiled:
    return Compiled(load_tokenizer(open_checkpoint(smollm2_path)))


def parse(format_name: str, tools: list[Tool], text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(tool_formats()[format_name], tools)
    content, calls = "", []
    for part in [*parser.push(text), *parser.finish()]:
        if isinstance(part, str):
            content += part
        elif isinstance(part, CallStart):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, calls


CALL = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    "llama3_json": '{"name": "NAME", "parameters": ARGUMENTS}',
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
    "mistral_args": "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    "functionary": "<function=NAME>ARGUMENTS</function>",
    "functionary_recipients": "NAME\nARGUMENTS",
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "granite": '<|tool_call|>[{"name": "NAME", "arguments": ARGUMENTS}]',
    "phi4_mini": '<|tool_call|>[{"name": "NAME", "arguments": ARGUMENTS}]<|/tool_call|>',
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
    "jamba": '<tool_calls>[{"name": "NAME", "arguments": ARGUMENTS}]</tool_calls>',
    "nemotron": '<TOOLCALL>[{"name": "NAME", "arguments": ARGUMENTS}]</TOOLCALL>',
    "cohere": ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}]<|END_ACTION|>'),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "apertus": '<|tools_prefix|>[{"NAME": ARGUMENTS}]<|tools_suffix|>',
    "internlm2": '<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ARGUMENTS}<|action_end|>',
    "granite_functions": '<function_call> {"name": "NAME", "arguments": ARGUMENTS}',
    "gemma": '```json\n{"name": "NAME", "parameters": ARGUMENTS}\n```',
    "command_r": actions(("NAME", "ARGUMENTS")),
    "nemotron_mini": '<toolcall> {"name": "NAME", "arguments": ARGUMENTS} </toolcall>',
    "glm4": "NAME\nARGUMENTS",
}


# Formats that write several calls within one mark: what begins, separates and ends them.
LISTS = {
    "mistral": ("[TOOL_CALLS][", ", ", "]"),
    "granite": ("<|tool_call|>[", ", ", "]"),
    "phi4_mini": ("<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "pythonic": ("[", ", ", "]"),
    "jamba": ("<tool_calls>[", ", ", "]</tool_calls>"),
    "nemotron": ("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "cohere": ("<|START_ACTION|>[", ", ", "]<|END_ACTION|>"),
    "lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "apertus": ("<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "olmo3": ("<function_calls>\n", "\n", "\n</function_calls>"),
    "minicpm3": ("<|tool_call_start|>\n```python\n", "\n", "\n```\n<|tool_call_end|>"),
    "command_r": ("Action: ```json\n[\n    ", ",\n    ", "\n]\n```"),
    "minimax_m2": ("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", "\n", "\n</｜DSML｜function_calls>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
}
SEPARATORS = {
    "gemma4": "",
    "glm4": "<|assistant|>",
    "nemotron_mini": " ",
    "llama3_json": "; ",
    "functionary_recipients": ">>>",
    "mistral_args": "",
    "harmony": "<|end|><|start|>assistant",
}


# Those whose calls are tags: text may follow them.
TAGGED = ("minimax_m2", "deepseek_v32")


def several(format_name: str, *calls: str) -> str:
    """One answer with these calls."""
    if format_name not in LISTS:
        return SEPARATORS.get(format_name, "\n").join(calls)
    begin, separator, end = LISTS[format_name]
    return begin + separator.join(one.removeprefix(begin).removesuffix(end) for one in calls) + end


def call(format_name: str, name: str, arguments: str) -> str:
    if format_name in ("pythonic", "lfm2", "olmo3", "minicpm3"):
        keywords = ", ".join(f"{key}={json.dumps(value)}" for key, value in json.loads(arguments).items())
        begin, _, end = LISTS[format_name]
        return f"{begin}{name}({keywords}){end}"
    if format_name == "gemma4":
        values = {
            key: f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)
            for key, value in json.loads(arguments).items()
        }
        return gemma4_call(name, ",".join(f"{key}:{value}" for key, value in values.items()))
    if format_name == "deepseek_v32":
        read = json.loads(arguments).items()
        parameters = [
            (key, value if isinstance(value, str) else json.dumps(value), isinstance(value, str)) for key, value in read
        ]
        return dsml(dsml_invoke(name, *parameters))
    if format_name in ("qwen3_coder", "glm45", "minimax_m2", "seed_oss"):
        values = {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in json.loads(arguments).items()
        }
        if format_name == "glm45":
            return glm_call(name, *values.items())
        if format_name == "minimax_m2":
            lines = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
            return f'<minimax:tool_call>\n<invoke name="{name}">\n{lines}</invoke>\n</minimax:tool_call>'
        if format_name == "seed_oss":
            lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
            return f"<seed:tool_call>\n<function={name}>\n{lines}</function>\n</seed:tool_call>"
        lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"
    return CALL[format_name].replace("NAME", name).replace("ARGUMENTS", arguments)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("tool_name", "arguments", "is_right"),
    [
        ("book", '{"seats": 2, "class": "first"}', True),
        ("book", '{"seats":2,"class":"second","stops":["Ulm"]}', True),
        ("book", '{\n  "seats": 2,\n  "class": "first"\n}', True),
        ("book", '{"seats": 0, "class": "first"}', False),
        ("book", '{"seats": 2, "class": "third"}', False),
        ("book", '{"seats": 2}', False),
        ("book", '{"seats": 2, "class": "first", "more": 1}', False),
        ("book", '{"seats": 2, "class": "first", "stops": ["much too long"]}', False),
        ("look", '{"seats": 2, "class": "first"}', False),
        ("now", "{}", True),
        ("now", '{"a": 1}', False),
    ],
)
def test_right_calls_are_accepted_and_wrong_ones_are_not(
    compiled: Compiled, name: str, tool_name: str, arguments: str, is_right: bool
) -> None:
    tools = [STRICT, {"type": "function", "function": {"name": "now"}}]
    text = call(name, tool_name, arguments)
    assert compiled.accepts(name, tools, text) is is_right
    if is_right:
        content, [(called, written)] = parse(name, tools, text)
        assert (content, called, json.loads(written)) == ("", tool_name, json.loads(arguments))
        assert name not in CALL or written == arguments


@pytest.mark.parametrize("name", sorted(CALL))
def test_white_space_in_arguments_is_bounded(compiled: Compiled, name: str) -> None:
    eight, nine = (f'{{"seats": 2,{" " * count}"class": "first"}}' for count in (8, 9))
    assert compiled.accepts(name, [STRICT], call(name, "book", eight))
    assert not compiled.accepts(name, [STRICT], call(name, "book", nine))


@pytest.mark.parametrize("name", FORMATS)
def test_text_instead_of_a_call_is_not_accepted(compiled: Compiled, name: str) -> None:
    assert not compiled.accepts(name, TOOLS, "I would rather talk.")
    assert not compiled.accepts(name, TOOLS, "")


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_only_in_parallel(compiled: Compiled, name: str) -> None:
    one = call(name, "now", "{}")
    text = several(name, one, one)
    assert compiled.accepts(name, TOOLS, text, parallel=True)
    assert not compiled.accepts(name, TOOLS, text, parallel=False)
    assert parse(name, TOOLS, text) == ("", [("now", "{}"), ("now", "{}")])


@pytest.mark.parametrize("name", FORMATS)
def test_the_parser_reads_whatever_the_grammar_allows(compiled: Compiled, name: str) -> None:
    tools = [STRICT, *TOOLS]
    names = {item["function"]["name"] for item in tools}
    num_complete = 0
    for seed in range(12):
        text, is_complete = compiled.random_answer(name, tools, seed)
        content, calls = parse(name, tools, text)
        if not is_complete:
            assert {called for called, _ in calls} <= names
            continue
        num_complete += 1
        assert content == ""
        assert calls
        for called, arguments in calls:
            assert called in names
            assert name not in CALL or arguments in text
            assert isinstance(json.loads(arguments), dict)
            assert not re.search(r"[ \n\r\t]{9}", re.sub(r'"(\\.|[^"\\])*"', "s", arguments))
    assert num_complete >= 3


# Formats without a mark: only an answer that begins as a call is one.
BARE = ("llama3_json", "pythonic")
OPTIONAL = sorted(name for name, item in tool_formats().items() if item.optional_grammar is not None)


def free_answer(name: str, text: str, *calls: str) -> str:
    """An answer of text and calls, where calls are free."""
    if name == "functionary_recipients":
        return "all\n" + ">>>".join([text, *calls])
    if name == "glm4":
        return "<|assistant|>".join([text, *calls])
    return text + (several(name, *calls) if calls else "")


@pytest.mark.parametrize("name", OPTIONAL)
def test_strict_arguments_are_enforced_where_calls_are_free(compiled: Compiled, name: str) -> None:
    optional_grammar = tool_formats()[name].optional_grammar
    assert optional_grammar is not None
    many, one = (optional_grammar([STRICT, *TOOLS], parallel, {}) for parallel in (True, False))

    def accepts(*parts: str) -> bool:
        return compiled.is_whole(compiled.start_grammar(many), free_answer(name, *parts))

    right, now = call(name, "book", '{"seats": 2, "class": "first"}'), call(name, "now", "{}")
    assert accepts("Hello there!\nHow are <you>? 1 < 2")
    assert accepts("")
    assert compiled.is_whole(compiled.start_grammar(many), right)
    assert compiled.is_whole(compiled.start_grammar(one), right)
    assert not compiled.is_whole(compiled.start_grammar(many), call(name, "book", '{"seats": 0, "class": "first"}'))
    if name != "glm4":  # there, a name that is not offered begins a text
        assert not compiled.is_whole(compiled.start_grammar(many), call(name, "look", "{}"))
    if name in BARE:
        return
    assert accepts("Let me see.\n", right)
    assert not accepts("Let me see.\n", call(name, "book", '{"seats": 0, "class": "first"}'))
    assert accepts("Let me see.\n", right, now)
    if name != "functionary_recipients":  # there, tools that are none are text for the grammar
        assert not accepts("Let me see.\n", right, call(name, "look", "{}"))


@pytest.mark.parametrize("name", OPTIONAL)
def test_text_behind_free_calls(compiled: Compiled, name: str) -> None:
    grammar = tool_formats()[name].optional_grammar([STRICT], True, {})  # type: ignore[misc]
    matcher = compiled.start_grammar(grammar)
    answer = call(name, "book", '{"seats": 2, "class": "first"}') + "\nDone."
    may_follow = name in TAGGED or name not in (*LISTS, "mistral_args", "llama3_json", "harmony", "glm4")
    assert compiled.is_whole(matcher, answer) is may_follow


def test_command_r_may_say_that_it_needs_no_tool_where_calls_are_free(compiled: Compiled) -> None:
    grammar = tool_formats()["command_r"].optional_grammar([STRICT], True, {})  # type: ignore[misc]
    no_call, wrong = (actions((name, "{}")) for name in ("directly-answer", "book"))
    right = actions(("book", '{"seats": 2, "class": "first"}'))
    for text, is_right in (
        (no_call, True),
        (f"{no_call}\n\nFour.", True),
        (f"{no_call}\n{right}", True),
        (f"{no_call}\n{wrong}", False),
        (wrong.replace("```json", ""), False),
        ("Action: run [1] and ```json", True),
    ):
        assert compiled.is_whole(compiled.start_grammar(grammar), text) is is_right, text


def test_text_of_glm_4_does_not_begin_with_a_line_that_names_a_tool(compiled: Compiled) -> None:
    grammar = tool_formats()["glm4"].optional_grammar([STRICT], True, {})  # type: ignore[misc]
    for text, is_right in (("book", True), ("book\nme", False), ("\nbook\n{}", False), ("So:\nbook\n{}", True)):
        assert compiled.is_whole(compiled.start_grammar(grammar), text) is is_right, text


def test_mistral_lists_where_calls_are_free(compiled: Compiled) -> None:
    grammar = tool_formats()["mistral"].optional_grammar([STRICT, *TOOLS], True, {})  # type: ignore[misc]
    for second, is_right in (("now", True), ("look", False)):
        objects = f'[{{"name": "now", "arguments": {{}}}}, {{"name": "{second}", "arguments": {{}}}}]'
        for space in ("", " "):
            text = f"So. [TOOL_CALLS]{space}{objects}"
            assert compiled.is_whole(compiled.start_grammar(grammar), text) is is_right


def test_all_formats_with_marks_of_their_own_enforce_strict_arguments() -> None:
    assert set(FORMATS) - set(OPTIONAL) == {"gemma"}


def accepts_text(compiled: Compiled, schema: dict[str, Any], value: str, *, strict: bool = True) -> bool:
    """True if a plain text parameter with this schema may have this text."""
    item = tool("f", {"a": schema}, ("a",))
    item["function"]["strict"] = strict
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    return compiled.accepts("qwen3_coder", [item], text)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, 'any "text"\n<b></b> <parameter=x>', "x</function>\n</tool_call>\n"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "<a>", "<ab>"),
        ({"type": "string", "minLength": 2}, "a\n", "a"),
        ({"enum": ["x y", "z"]}, "x y", '"z"'),
        ({"anyOf": [{"enum": ["x", None]}, {"const": "y"}]}, "null", "None"),
        ({"anyOf": [{"enum": ["x"]}, {"type": "null"}]}, "null", "y"),
        ({"type": "integer", "maximum": 9}, "9", "10"),
        ({"type": "boolean"}, "true", "True"),
        ({"type": "array", "items": {"type": "string"}}, '["a"]', "a"),
        ({}, "anything", "x</parameter>"),
    ],
)
def test_plain_text_follows_the_schema(compiled: Compiled, schema: dict[str, Any], right: str, wrong: str) -> None:
    assert accepts_text(compiled, schema, right)
    assert not accepts_text(compiled, schema, wrong)


@pytest.mark.parametrize("schema", [{"type": "string", "pattern": "^a$"}, {"type": "string", "format": "date"}])
def test_what_plain_text_cannot_be_held_to(compiled: Compiled, schema: dict[str, Any]) -> None:
    assert accepts_text(compiled, schema, "anything", strict=False)
    with pytest.raises(UsageError, match="leave it out, or leave strict out") as caught:
        accepts_text(compiled, schema, "a")
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_json_schema")


@pytest.mark.parametrize(
    ("schema", "value", "is_text", "is_right"),
    [
        ({"type": "string"}, "5", True, True),
        ({"type": "string"}, "5", False, False),
        ({"type": "integer"}, "5", False, True),
        ({"type": "integer"}, "5", True, False),
        ({"type": ["string", "null"]}, "null", False, True),
        ({"enum": ["x", None]}, "null", True, False),
        ({"enum": ["x", None]}, "null", False, True),
        ({"enum": ["x", None]}, "x", True, True),
        ({}, "[5]", False, True),
        ({}, "[5", False, False),
    ],
)
def test_tags_say_the_type_that_the_schema_has(
    compiled: Compiled, schema: dict[str, Any], value: str, is_text: bool, is_right: bool
) -> None:
    item = tool("f", {"a": schema}, ("a",))
    item["function"]["strict"] = True
    text = dsml(dsml_invoke("f", ("a", value, is_text)))
    assert compiled.accepts("deepseek_v32", [item], text) is is_right
    if is_right:
        assert parse("deepseek_v32", [item], text) == (
            "",
            [("f", json.dumps({"a": value if is_text else json.loads(value)}))],
        )


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, '<|"|>any "text"\n}<tool_call|><|"|>', '"any"'),
        ({"enum": ["x y", "z"]}, '<|"|>x y<|"|>', '<|"|>y<|"|>'),
        ({"const": "x"}, '<|"|>x<|"|>', '"x"'),
        ({"type": "string", "maxLength": 2}, '"ab"', '"abc"'),
        ({"type": "string", "pattern": "^a+$"}, '"aa"', '"b"'),
        ({"enum": ["x", 1]}, "1", "2"),
        ({"type": "array", "items": {"type": "string"}}, '["a"]', "[1]"),
        ({"type": "boolean"}, "true", "True"),
    ],
)
def test_gemma_4_writes_texts_between_marks(compiled: Compiled, schema: dict[str, Any], right: str, wrong: str) -> None:
    item = tool("f", {"a": schema}, ("a",))
    item["function"]["strict"] = True
    assert compiled.accepts("gemma4", [item], gemma4_call("f", f"a:{right}"))
    assert not compiled.accepts("gemma4", [item], gemma4_call("f", f"a:{wrong}"))


def test_names_of_parameters_that_are_no_plain_words(compiled: Compiled) -> None:
    item = tool("f", {"a b": {"type": "string"}})
    item["function"]["strict"] = True
    for name in ("gemma4", "pythonic"):
        with pytest.raises(UsageError, match="plain words; rename it"):
            compiled.start(name, [item])


def test_further_parameters_only_where_the_schema_has_them(compiled: Compiled) -> None:
    text = call("qwen3_coder", "f", '{"a": 3, "b": 4}')
    for schema, is_right in (({}, False), ({"additionalProperties": {"type": "integer"}}, True), ({"$ref": "#"}, True)):
        item = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert compiled.accepts("qwen3_coder", [item], text) is is_right


def test_names_of_parameters_that_tags_cannot_hold(compiled: Compiled) -> None:
    item = tool("f", {"a>": {"type": "string"}})
    assert compiled.accepts("qwen3_coder", [item], call("qwen3_coder", "f", "{}"))
    item["function"]["strict"] = True
    with pytest.raises(UsageError, match="its name"):
        tool_formats()["qwen3_coder"].grammar([item], False, {})


def test_keywords_that_cannot_be_enforced_are_left_out_for_tools_that_are_not_strict(compiled: Compiled) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    item = tool("sort", {"numbers": numbers, "how": {"type": "string", "format": "int32"}}, ("numbers",))
    assert compiled.accepts("hermes", [item], call("hermes", "sort", '{"numbers": [1, 1]}'))
    assert not compiled.accepts("hermes", [item], call("hermes", "sort", '{"numbers": ["a"]}'))
    assert not compiled.accepts("hermes", [item], call("hermes", "sort", "{}"))


def test_any_object_will_do_where_a_schema_that_only_describes_cannot_be_compiled(compiled: Compiled) -> None:
    item = tool("find", {"what": {"type": "string", "pattern": "(?=a)b"}})
    assert compiled.accepts("hermes", [item], call("hermes", "find", '{"what": "x"}'))
    assert not compiled.accepts("hermes", [item], call("hermes", "find", "[]"))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_sixty_realistic_tools_within_two_seconds(compiled: Compiled, name: str) -> None:
    tools = realistic_tools(60)
    assert 100_000 < len(json.dumps(tools)) < 150_000
    started = time.process_time()
    check_tools(tools)
    compiled.start(name, tools, parallel=True)
    assert time.process_time() - started < 5.0  # two seconds where nothing else shares the cores
    assert compiled.accepts(name, tools, call(name, "tool_59", '{"query": "x", "own_59": 1.5}'))
    assert not compiled.accepts(name, tools, call(name, "tool_59", '{"query": "x", "own_58": 1.5}'))


def test_plain_text_of_a_schema_that_cannot_be_compiled_is_free(compiled: Compiled) -> None:
    loose = {"type": "array", "items": {"type": "string", "pattern": "(?=a)b"}}
    assert accepts_text(compiled, loose, '["b"]', strict=False)
    assert not accepts_text(compiled, loose, "3", strict=False)
    hopeless = {"type": "array", "items": {"$ref": "#anchor"}}
    assert accepts_text(compiled, hopeless, '["b"]', strict=False)
    assert accepts_text(compiled, hopeless, "3", strict=False)
    assert not accepts_text(compiled, hopeless, "b", strict=False)


@pytest.mark.parametrize("name", FORMATS)
def test_tools_whose_schemas_only_describe_can_be_made_to_be_called(compiled: Compiled, name: str) -> None:
    """Schemas of any draft, with numbers and patterns that nothing can enforce."""
    described = {key: parameters for key, parameters in DESCRIBING.items() if key != "3,000 properties"}
    functions = [{"name": f"f{i}", "parameters": parameters} for i, parameters in enumerate(described.values())]
    tools = [{"type": "function", "function": function} for function in functions]
    check_tools(tools)
    text, _ = compiled.random_answer(name, tools, seed=1, max_tokens=30)
    assert text
    if name == "hermes":
        index = list(described).index("null or an object")
        assert compiled.accepts(name, tools, call(name, f"f{index}", "{}"))
        assert not compiled.accepts(name, tools, call(name, f"f{index}", "null"))
