"""Marks that a vocabulary has as tokens: grammars name the tokens, and their text reaches the parsers."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.engine.texts.constrained import GrammarCompiler
from octavo.loader.checkpoint import open_checkpoint
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.generation.chat_plan import AnswerFormat, mark_token_ids, plan_chat
from octavo.server.generation.content import plain
from octavo.server.generation.spec import ChatSpec
from octavo.server.tool_parsers.answer import CallArguments, CallStart
from octavo.server.tool_parsers.tool_format import tool_formats
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.gguf_vocab import read_gguf_tokenizer
from octavo.tokenizer.tokenizer import Detokenizer, Tokenizer
from tests.support.fake_client import FakeClient, fake_model
from tests.support.scripted_server import with_template
from tests.support.tool_outputs import TOOLS
from tests.support.vocabularies import scored_metadata

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call|>")
MARKS += ("<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>")
MARKS += (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
MARKS += (
    "<|/tool_call|>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
MARKS += ("<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call_start|>", "<|tool_call_end|>")
MARKS += ("<tool_calls>", "</tool_calls>", "<TOOLCALL>", "</TOOLCALL>", "<|tool_call_argument_begin|>")
MARKS += ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>")
MARKS += ("<|tools_prefix|>", "<|tools_suffix|>", "<|action_start|>", "<|action_end|>", "<|plugin|>")
MARKS += ("<|tool_call>", "<tool_call|>", '<|"|>')
MARKS += ("<toolcall>", "</toolcall>", "<|assistant|>", "<|observation|>")
MARKS += ("<function_calls>", "</function_calls>", "<function_call>")
USER_DEFINED = 4  # a GGUF token type: added to the vocabulary, but shown
WITH_MARKS = [
    "deepseek_v3",
    "deepseek_v31",
    "granite",
    "phi4_mini",
    "harmony",
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_args",
]
WITH_MARKS += ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"]
WITH_MARKS += ["cohere", "jamba", "kimi_k2", "lfm2", "nemotron"]
WITH_MARKS += ["apertus", "gemma4", "nemotron_mini", "granite_functions", "internlm2", "minicpm3", "olmo3"]
# The call of `now` as each format's models write it, `now` without arguments.
CALLS = {
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "granite": '<|tool_call|>[{"name": "now", "arguments": {}}]',
    "jamba": '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>',
    "nemotron": '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    "lfm2": "<|tool_call_start|>[now()]<|tool_call_end|>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "harmony": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    "apertus": '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>',
    "granite_functions": '<function_call> {"name": "now", "arguments": {}}',
    "internlm2": '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>',
    "minicpm3": "<|tool_call_start|>\n```python\nnow()\n```\n<|tool_call_end|>",
    "olmo3": "<function_calls>\nnow()\n</function_calls>",
    "phi4_mini": '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>',
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
    "nemotron_mini": '<toolcall> {"name": "now", "arguments": {}} </toolcall>',
    "glm45": "<tool_call>now\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]now[ARGS]{}",
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
}


def with_marks(path: Path, *, are_control: bool) -> Tokenizer:
    """SmolLM2's vocabulary and the marks behind it."""
    metadata: dict[str, Any] = dict(open_checkpoint(path).file.metadata)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = list(metadata["tokenizer.ggml.token_type"])
    tokens += MARKS
    types += [types[1] if are_control else USER_DEFINED] * len(MARKS)
    return read_gguf_tokenizer({**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})


@pytest.fixture(scope="module", params=["control", "shown"])
def tokenizer(smollm2_path: Path, request: pytest.FixtureRequest) -> Tokenizer:
    return with_marks(smollm2_path, are_control=request.param == "control")


class Plan(NamedTuple):
    spec: ChatSpec
    answer_format: AnswerFormat


def plan(tokenizer: Tokenizer, name: str, **fields: Any) -> Plan:
    tool_format = tool_formats()[name]
    model = dataclasses.replace(fake_model(tokenizer, FakeClient(tokenizer)), tool_format=tool_format)
    try:
        spec = {
            "params": SamplingParams(),
            "messages": [{"role": "user", "content": plain("Hi")}],
            "tools": TOOLS,
            **fields,
        }
        return Plan(*plan_chat(model, ChatSpec(**spec)))
    finally:
        model.prompts.close()


@cache
def may_end(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[vocab]: whether the token has a character that ends a call, or a part of one."""
    return np.array([bool(set(tokenizer.token_bytes(i)) & set(b'"}]>')) for i in range(tokenizer.vocab_size)])


@cache
def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def matcher_of(tokenizer: Tokenizer, params: object) -> Any:
    assert isinstance(params, SamplingParams)
    assert params.structured_outputs is not None
    return compiler_of(tokenizer).compile(params.structured_outputs).copy().matcher


def allowed_ids(matcher: Any) -> NDArray[np.intp]:
    """Ascending."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"))


def allowed(matcher: Any) -> set[int]:
    return set(allowed_ids(matcher).tolist())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=True)


def read(tokenizer: Tokenizer, made: Plan, token_ids: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """The parts of an answer with these tokens, as the engine would deliver it."""
    assert made.answer_format.create_tool_parser is not None
    parser = made.answer_format.create_tool_parser()
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=made.spec.params.skip_special_tokens)
    parts = [part for token_id in token_ids for part in parser.push(detokenizer.push([token_id]))]
    content, calls = "", []
    for part in [*parts, *parser.push(detokenizer.flush()), *parser.finish()]:
        if isinstance(part, str):
            content += part
        elif isinstance(part, CallStart):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, calls


@pytest.mark.parametrize("name", WITH_MARKS)
def test_a_forced_call_begins_with_the_token(tokenizer: Tokenizer, name: str) -> None:
    made = plan(tokenizer, name, tool_choice="required")
    token_ids = encode(tokenizer, CALLS[name])
    mark = next(mark for mark in MARKS if CALLS[name].startswith(mark))
    assert tokenizer.token_bytes(token_ids[0]) == mark.encode()
    matcher = matcher_of(tokenizer, made.spec.params)
    first = allowed(matcher)
    assert token_ids[0] in first
    if name != "llama3_json":  # its templates write calls without the tag
        assert first == {token_ids[0]}
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_accepting()
    assert read(tokenizer, made, token_ids) == ("", [("now", "{}")])


@pytest.mark.parametrize("name", WITH_MARKS)
def test_what_the_mask_allows_is_read_as_a_call(tokenizer: Tokenizer, name: str) -> None:
    made = plan(tokenizer, name, tool_choice="required", tools=[TOOLS[2]], parallel_tool_calls=False)
    rng = np.random.default_rng(0)
    for _ in range(4):
        matcher, token_ids = matcher_of(tokenizer, made.spec.params), []
        while not matcher.is_accepting():
            token_ids.append(int(rng.choice(allowed_ids(matcher))))
            matcher.consume_token(token_ids[-1])
        content, [(called, arguments)] = read(tokenizer, made, token_ids)
        assert (content, called, "".join(arguments.split())) == ("", "now", "{}")


@pytest.mark.parametrize("name", WITH_MARKS)
def test_a_free_call_is_read_from_tokens(tokenizer: Tokenizer, name: str) -> None:
    made = plan(tokenizer, name)
    assert isinstance(made.spec.params, SamplingParams)
    assert made.spec.params.structured_outputs is None
    assert read(tokenizer, made, encode(tokenizer, f"So. {CALLS[name]}")) == ("So.", [("now", "{}")])


@pytest.mark.parametrize("name", WITH_MARKS)
def test_free_calls_to_strict_tools_with_tokens_or_characters(tokenizer: Tokenizer, name: str) -> None:
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    made = plan(tokenizer, name, tools=[strict])
    text = "" if name == "llama3_json" else "So. "
    mark = next(mark for mark in MARKS if CALLS[name].startswith(mark))
    spelled = [i for char in mark for i in encode(tokenizer, char)] + encode(tokenizer, CALLS[name][len(mark) :])
    for call in (encode(tokenizer, CALLS[name]), spelled):
        token_ids = encode(tokenizer, text) + call
        matcher = matcher_of(tokenizer, made.spec.params)
        num_allowed = matcher.try_consume_tokens(token_ids)
        if name == "llama3_json" and call is spelled:  # text begins with neither a brace nor the tag
            assert num_allowed < len(token_ids)
            continue
        assert num_allowed == len(token_ids)
        assert matcher.is_accepting()
        assert read(tokenizer, made, token_ids) == (text.strip(), [("now", "{}")])
    wrong = encode(tokenizer, text + CALLS[name].replace("now", "new"))
    assert matcher_of(tokenizer, made.spec.params).try_consume_tokens(wrong) < len(wrong)


MARK_TEXTS = dict.fromkeys(("glm45", "hermes", "qwen3_coder"), "<tool_call>") | {
    "granite": "<|tool_call|>",
    "phi4_mini": "<|tool_call|>",
    "minimax_m2": "<minimax:tool_call>",
    "seed_oss": "<seed:tool_call>",
    "jamba": "<tool_calls>",
    "nemotron": "<TOOLCALL>",
    "cohere": "<|START_ACTION|>",
    "lfm2": "<|tool_call_start|>",
    "apertus": "<|tools_prefix|>",
    "gemma4": "<|tool_call>",
    "nemotron_mini": "<toolcall>",
    "granite_functions": "<function_call>",
    "internlm2": "<|action_start|><|plugin|>",
    "minicpm3": "<|tool_call_start|>\n```python",
    "olmo3": "<function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
}
MARK_TEXTS |= {"harmony": "<|channel|>commentary to=functions."}
MARK_TEXTS |= dict.fromkeys(("deepseek_v3", "deepseek_v31"), "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>")


@pytest.mark.parametrize("name", [name for name in WITH_MARKS if name != "llama3_json"])
def test_strict_arguments_hold_whatever_the_mask_allows(tokenizer: Tokenizer, name: str) -> None:
    """Random answers, pushed towards calls and their ends."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}}, "required": ["n"]}
    strict = {"type": "function", "function": {"name": "book", "strict": True, "parameters": schema}}
    strict["function"]["parameters"]["additionalProperties"] = False
    made = plan(tokenizer, name, tools=[strict])
    end_of_text = sorted(tokenizer.eos_token_ids)
    num_calls = 0
    for seed in range(8):
        matcher, rng, token_ids = matcher_of(tokenizer, made.spec.params), np.random.default_rng(seed), list[int]()
        while len(token_ids) < 80 and not (num_calls and matcher.is_accepting() and rng.random() < 0.1):
            mark = tokenizer.encode(
                MARK_TEXTS.get(name, "[TOOL_CALLS]"), add_special_tokens=False, parse_special=rng.random() < 0.5
            )
            if rng.random() < 0.2 and matcher.validate_tokens(mark) == len(mark):
                matcher.consume_tokens(mark)
                token_ids += mark
                continue
            choices = np.setdiff1d(allowed_ids(matcher), end_of_text, assume_unique=True)
            if not choices.size:
                break
            ends = choices[may_end(tokenizer)[choices]]
            token_ids.append(int(rng.choice(ends if ends.size and rng.random() < 0.5 else choices)))
            matcher.consume_token(token_ids[-1])
        calls = read(tokenizer, made, token_ids)[1]
        for called, arguments in calls if matcher.is_accepting() else calls[:-1]:
            num_calls += 1
            assert called == "book"
            assert json.loads(arguments)["n"] in (3, 4, 5)
    assert num_calls > 0


def test_control_tokens_stay_hidden_where_no_mark_is_one(smollm2_path: Path) -> None:
    for are_control in (True, False):
        made = plan(with_marks(smollm2_path, are_control=are_control), "hermes")
        assert made.spec.params.skip_special_tokens is not are_control


def test_a_vocabulary_that_puts_a_space_before_texts() -> None:
    metadata = scored_metadata()
    count = len(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    for name, last in (("tokens", ["[TOOL_CALLS]", "[ARGS]"]), ("token_type", [3, 3]), ("scores", [0.0, 0.0])):
        metadata[f"tokenizer.ggml.{name}"] = [*metadata[f"tokenizer.ggml.{name}"], *last]  # type: ignore[misc]
    token_ids = mark_token_ids(read_gguf_tokenizer(metadata), tool_formats()["mistral_args"])
    assert token_ids == {"[TOOL_CALLS]": count, "[ARGS]": count + 1}


def test_marks_that_are_no_tokens(smollm2_tokenizer: Tokenizer) -> None:
    for name in WITH_MARKS:
        assert mark_token_ids(smollm2_tokenizer, tool_formats()[name]) == {}


THINKING = "{% if tools %}<tool_call>{% endif %}</think>{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("fields", "is_told_apart"),
    [({}, True), ({"tool_choice": "none"}, True), ({"tool_choice": "required"}, False)],
)
def test_thinking_is_told_apart_where_calls_are_free(
    smollm2_tokenizer: Tokenizer, fields: dict[str, Any], is_told_apart: bool
) -> None:
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    made = plan(with_template(smollm2_tokenizer, THINKING), "hermes", tools=[strict], **fields)
    assert (made.answer_format.reasoning is not None) is is_told_apart
    if not fields:
        matcher = matcher_of(smollm2_tokenizer, made.spec.params)
        answer = encode(smollm2_tokenizer, f"<think>\nHm.\n</think>\n\n{CALLS['hermes']}")
        assert matcher.try_consume_tokens(answer) == len(answer)


def test_channels_are_told_apart_beside_strict_calls(tokenizer: Tokenizer) -> None:
    """The grammar names the tokens of the channels, so that the model may think before it calls or answers."""
    template = "{{ '<|channel|>analysis<|message|><|channel|>commentary' }}{{ tools }}"
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    made = plan(with_template(tokenizer, template), "harmony", tools=[strict])
    assert made.answer_format.reasoning is not None
    start = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>So.<|end|><|start|>assistant"
    for rest in (CALLS["harmony"], preamble + CALLS["harmony"], "<|channel|>final<|message|>Four."):
        token_ids = encode(tokenizer, start + rest)
        matcher = matcher_of(tokenizer, made.spec.params)
        assert matcher.try_consume_tokens(token_ids) == len(token_ids)
        assert matcher.is_accepting()
    wrong = encode(tokenizer, start + CALLS["harmony"].replace("now", "new"))
    assert matcher_of(tokenizer, made.spec.params).try_consume_tokens(wrong) < len(wrong)


@pytest.mark.slow
def test_qwen_has_its_tags_as_tokens(qwen_0_5b_path: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(qwen_0_5b_path))
    token_ids = mark_token_ids(tokenizer, tool_formats()["hermes"])
    assert token_ids == {"<tool_call>": 151657, "</tool_call>": 151658}
    grammar = tool_formats()["hermes"].grammar(TOOLS, True, token_ids)
    matcher = matcher_of(tokenizer, SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar)))
    whole = encode(tokenizer, CALLS["hermes"])
    assert allowed(matcher) == {151657}
    assert matcher.try_consume_tokens(whole) == len(whole)
    assert matcher.is_accepting()
