"""Thinking told apart from answers, cut at every place."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.reasoning.reasoning_format import (
    ReasoningFormat,
    ReasoningParser,
    ReasoningPart,
    find_reasoning_format,
)
from octavo.server.tool_parsers.answer import join_neighbours

# What tells the formats apart in published templates, shortened.
QWEN3 = "{%- if '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0] %}"
DEEPSEEK_R1 = (
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{'<｜Assistant｜><think>\\n'}}"
)
SMOLLM3 = "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}"
MAGISTRAL = "First draft your thinking process: [THINK]Your thoughts[/THINK]Here, provide a response."
GRANITE_32 = "Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'"
GRANITE_33 = "Write your thoughts between <think></think> and write your response between <response></response>"
ERNIE_45 = "{{- '<think>\\n' + t + '\\n</think>\\n' }}{{- '<response>\\n' + content + '\\n</response>\\n' }}"
GLM_45 = "{%- if '</think>' in content %}{{ '<|assistant|>' }}{{- '\n<think></think>' }}"
GPT_OSS = "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
SMOLLM2 = "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
LLAMA3 = "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"

OPENED = "<|im_start|>assistant\n<think>\n"
PLAIN = "<|im_start|>assistant\n"
CASES = [
    (PLAIN, "<think>\nHm, well.\n</think>\n\nFour.", "Hm, well.", "Four."),
    (PLAIN, "\n<think>a</think>b", "a", "b"),
    (PLAIN, "<think>\n\n</think>\n\nFour.\n", "", "Four.\n"),
    (PLAIN, "Four. <think>not here</think>", "", "Four. <think>not here</think>"),
    (PLAIN, "  Four.", "", "  Four."),
    (PLAIN, "<think>cut </thi", "cut </thi", ""),
    (PLAIN, "<think>cut  \n", "cut", ""),
    (PLAIN, "<thin", "", "<thin"),
    (PLAIN, "<thing> is", "", "<thing> is"),
    (PLAIN, "<think>a</think>b</think>c <think>", "a", "b</think>c <think>"),
    (
        PLAIN,
        "<think>a <tool_call> < </ </thin </think>\n<tool_call>{}</tool_call>",
        "a <tool_call> < </ </thin",
        "<tool_call>{}</tool_call>",
    ),
    (PLAIN, "<think>one\n\n two  three \n</think>", "one\n\n two  three", ""),
    (PLAIN, "", "", ""),
    (PLAIN, " \n ", "", " \n "),
    (OPENED, "Hm.\n</think>\n\nFour.", "Hm.", "Four."),
    (OPENED, "<think>\nHm.\n</think>\n\nFour.", "Hm.", "Four."),
    (OPENED, "  Hm", "Hm", ""),
    (OPENED, "<thi", "<thi", ""),
    (OPENED, "</think>Four.", "", "Four."),
    (OPENED, " \n", "", ""),
    (OPENED + "\n</think>\n\n", "Four. </think>", "", "Four. </think>"),
]

STEP = (  # Step 3.5
    "{%- set content = content.split('</think>')[-1] %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)


def think() -> ReasoningFormat:
    found = find_reasoning_format(QWEN3)
    assert found is not None
    return found


def parse(prompt: str, pieces: list[str], reasoning_format: ReasoningFormat | None = None) -> tuple[str, str]:
    parser = (reasoning_format or think()).create_parser(prompt)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(part if isinstance(part, str) else part.text for part in parts)
    kinds = [kind for kind, _ in itertools.groupby(isinstance(part, ReasoningPart) for part in parts)]
    assert kinds in ([], [True], [False], [True, False])
    thinking = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return thinking, "".join(part for part in parts if isinstance(part, str))


def test_formats_are_found_in_published_templates() -> None:
    for template in (QWEN3, DEEPSEEK_R1, SMOLLM3, GLM_45, STEP):
        found = find_reasoning_format(template)
        assert found is not None
        assert (found.open, found.close) == ("<think>", "</think>")
    found = find_reasoning_format(MAGISTRAL)
    assert found is not None
    assert (found.open, found.close) == ("[THINK]", "[/THINK]")
    assert find_reasoning_format(SMOLLM2) is None
    assert find_reasoning_format(LLAMA3) is None
    assert find_reasoning_format("") is None


@pytest.mark.parametrize(("prompt", "text", "thinking", "answer"), CASES)
def test_answers_cut_everywhere(prompt: str, text: str, thinking: str, answer: str) -> None:
    assert parse(prompt, [text]) == (thinking, answer)
    assert parse(prompt, list(text)) == (thinking, answer)
    for cut in range(len(text)):
        assert parse(prompt, [text[:cut], text[cut:]]) == (thinking, answer)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_text_gives_the_same_whatever_the_pieces(data: st.DataObject) -> None:
    words = st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "a", "</thi", "é"])
    text = "".join(data.draw(st.lists(words, max_size=20)))
    prompt = data.draw(st.sampled_from([OPENED, PLAIN]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(prompt, pieces) == parse(prompt, [text])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<thi", []),
        ("<think>Hm.</thi", [ReasoningPart("Hm.")]),
        ("<think>Hm.</think>a </thi", [ReasoningPart("Hm."), "a </thi"]),
    ],
)
def test_half_a_mark_at_a_cut_is_no_text(text: str, shown: list[object]) -> None:
    parser = think().create_parser("")
    assert join_neighbours([*parser.push(text), *parser.finish("")]) == shown
    parser = think().create_parser("")
    kept = [part if isinstance(part, str) else part.text for part in [*parser.push(text), *parser.finish()]]
    assert "".join(kept) == re.sub("</?think>", "", text)  # what the model itself has ended


def test_magistral() -> None:
    found = find_reasoning_format(MAGISTRAL)
    assert parse("[INST]2+2?[/INST]", list("[THINK]Hm [x] [/TH.[/THINK]Four."), found) == ("Hm [x] [/TH.", "Four.")


def format_of(template: str) -> ReasoningFormat:
    found = find_reasoning_format(template)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>Hm.</think><response>Four.</response>", "Hm.", "Four."),
        ("<think>\nHm.\n</think>\n\n<response>\nFour. </resp>\n</response>", "Hm.", "Four. </resp>\n"),
        ("<think>Hm.</think>Four. <response>", "Hm.", "Four. <response>"),
        ("<response>Four.</response> So.", "", "Four. So."),
        ("<response>Four.</respo", "", "Four.</respo"),
        ("<think>Hm.</think><respo", "Hm.", "<respo"),
        ("Four.</response>", "", "Four.</response>"),
        ("", "", ""),
    ],
)
def test_granite_3_3_cut_everywhere(text: str, thinking: str, answer: str) -> None:
    for cut in range(len(text) + 1):
        assert parse(PLAIN, [text[:cut], text[cut:]], format_of(GRANITE_33)) == (thinking, answer)
    assert parse(PLAIN, list(text), format_of(GRANITE_33)) == (thinking, answer)


def test_ernie_4_5_cut_everywhere() -> None:
    found = format_of(ERNIE_45)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    for answer, shown in (("<response>\nFour.\n</response>\n", "Four.\n\n"), (call, call)):
        text = f"<think>\nHm.\n</think>\n\n{answer}"
        for cut in range(len(text) + 1):
            assert parse(PLAIN, [text[:cut], text[cut:]], found) == ("Hm.", shown)


def test_granite_3_2() -> None:
    text = "Here is my thought process:\n\nHm. Here is my.\n\nHere is my response:\n\nFour."
    assert parse(PLAIN, list(text), format_of(GRANITE_32)) == ("Hm. Here is my.", "Four.")
    assert parse(PLAIN, ["Here is my cat."], format_of(GRANITE_32)) == ("", "Here is my cat.")


# What tells these in published templates, an answer, its thinking and its text.
FURTHER = {
    "Apertus": ("{{- '<|inner_prefix|>' }}{{- '<|inner_suffix|>' }}", "<|inner_prefix|>Hm.<|inner_suffix|>Four."),
    "EXAONE Deep": (
        "{% if '</thought>' in content %}{{- '[|assistant|]<thought>\\n' }}",
        "<thought>\nHm.\n</thought>\n\nFour.",
    ),
    "Gemma 4": (
        "{%- for part in text.split('<channel|>') %}<|channel>thought",
        "<|channel>thought\nHm.\n<channel|>Four.",
    ),
    "Hunyuan": (
        "{{ content.split('<answer>')[1].strip('</answer>') }}{{- '<think>\\n\\n</think>\\n' }}",
        "<think>\nHm.\n</think>\n<answer>\nFour.</answer>",
    ),
    "MiniCPM 3": (
        "{{- '<|thought_start|>\\n' + thought + '\\n<|thought_end|>\\n' }}",
        "<|thought_start|>\nHm.\n<|thought_end|>\nFour.",
    ),
}


@pytest.mark.parametrize("model", FURTHER)
def test_further_formats_cut_everywhere(model: str) -> None:
    template, text = FURTHER[model]
    found = format_of(template)
    for cut in range(len(text) + 1):
        assert parse(PLAIN, [text[:cut], text[cut:]], found) == ("Hm.", "Four.")
    assert parse(PLAIN, list(text), found) == ("Hm.", "Four.")
    assert parse(PLAIN, ["Four."], found) == ("", "Four.")
    assert parse(PLAIN + found.open, ["Hm.", found.close, "Four."], found) == ("Hm.", "Four.")


START = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
EARLIER = " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
# Answers as the guide to the harmony format writes them, and damaged ones: the thinking, and the text that is left.
HARMONY = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.", "Hm.", "Four."),
    ("<|channel|>final<|message|>Four.<|return|>", "", "Four."),
    (f"<|channel|>analysis<|message|>Hm. {START}{CALL}", "Hm. ", "<|start|>assistant" + CALL),
    (f"<|channel|>analysis<|message|>Hm.{START}{EARLIER}", "Hm.", "<|start|>assistant" + EARLIER),
    (EARLIER, "", EARLIER),
    (f"<|channel|>commentary<|message|>First:{START}{CALL}", "", "First:<|start|>assistant" + CALL),
    (
        f"<|channel|>analysis<|message|>a{START}<|channel|>analysis<|message|>b{START}<|channel|>commentary<|message|>c"
        f"{START}<|channel|>final<|message|>d",
        "a\n\nb",
        "c\n\nd",
    ),
    (
        "<|channel|>commentary<|message|>a<|end|>" + CALL.replace("{}", '{"b": "<|call|>"}'),
        "",
        "a" + CALL.replace("{}", '{"b": "<|call|>"}').removesuffix("<|call|>"),
    ),
    ("<|channel|>analysis<|message|>cut <|en", "cut <|en", ""),
    ("<|channel|>analysis<|mess", "", "<|channel|>analysis<|mess"),
    ("<|channel|>analysis<|end|>x", "", "<|channel|>analysisx"),
    ("<|channel|>a<|channel|>final<|message|>x", "", "<|channel|>a\n\nx"),
    ("<|start|>a<|start|>assistant<|channel|>final<|message|>x", "", "<|start|>a\n\nx"),
    ("<|channel|>" + "a" * 300, "", "<|channel|>" + "a" * 300),
    ("Four. <|thing", "", "Four. <|thing"),
    ("<think>\nFour.</think>\n", "", "<think>\nFour.</think>\n"),
    (" to be", "", " to be"),
    ("", "", ""),
]


def parse_harmony(prompt: str, pieces: list[str]) -> tuple[str, str]:
    found = find_reasoning_format(GPT_OSS)
    assert found is not None
    parser = found.create_parser(prompt)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    thinking = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return thinking, "".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize(("text", "thinking", "answer"), HARMONY)
def test_channels_cut_everywhere(text: str, thinking: str, answer: str) -> None:
    prompt = "<|start|>assistant"
    assert parse_harmony(prompt, list(text)) == (thinking, answer)
    for cut in range(len(text) + 1):
        assert parse_harmony(prompt, [text[:cut], text[cut:]]) == (thinking, answer)


def test_a_prompt_may_open_the_analysis() -> None:
    text = "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four."
    assert parse_harmony("<|start|>assistant<|channel|>analysis<|message|>", [text]) == ("Hm.", "Four.")


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_channels_give_the_same_whatever_the_pieces(data: st.DataObject) -> None:
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|", "|>"]
    words = st.sampled_from([*marks, "analysis", "final", " to=functions.", "assistant", " ", "a", "{}"])
    text = "".join(data.draw(st.lists(words, max_size=20)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert parse_harmony("", pieces) == parse_harmony("", [text])


@pytest.mark.parametrize("piece", ["<|channel|>", "<|channel|>analysis<|message|>a<|end|>", "<|message|>", " "])
def test_time_of_channels_is_linear(piece: str) -> None:
    started = time.process_time()
    parse_harmony("", list(piece * (100_000 // len(piece))))
    assert time.process_time() - started < 5


def test_thinking_streams_and_says_that_it_is_thinking() -> None:
    parser = ReasoningParser(think(), PLAIN)
    assert not parser.is_reasoning
    assert parser.push("<think>") == []
    assert parser.is_reasoning
    assert parser.push("\nHm, ") == [ReasoningPart("Hm,")]
    assert parser.push("well") == [ReasoningPart(" well")]
    parser.push(".</think>")
    assert not parser.is_reasoning
    assert ReasoningParser(think(), OPENED).is_reasoning


@pytest.mark.parametrize(
    "text", ["<think>" + "a" * 100_000, "<think>" + " " * 100_000, " " * 100_000, "<think>" + "</thin" * 16_000]
)
def test_time_is_linear_in_the_length(text: str) -> None:
    started = time.process_time()
    parse(PLAIN, list(text))
    parse(PLAIN, [text])
    assert time.process_time() - started < 5
