"""Tasks from local JSON lines in the formats of lm-evaluation-harness, as questions for a model.

The prompts are also the same as in the harness: `hellaswag`, `arc`, `mmlu`, `winogrande` and `gsm8k` (strict and
flexible exact match). A line in any other format may spell out the question: `{"query", "choices", "gold"}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from octavo.errors import UsageError
from octavo.quality.texts import read_limited

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Kind: TypeAlias = Literal["hellaswag", "arc", "mmlu", "winogrande", "gsm8k", "choices"]
_Record: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """One line of a task. Without choices the model answers freely.

    contexts, continuations: one per choice, in order; either list may repeat the same text.
    choices: texts by whose length the scores are normalized.
    gold: index of the right choice.
    shown: the whole line with its answer, for use as an example in other prompts.
    answer: the right answer if there are no choices.
    """

    context: str
    shown: str
    contexts: tuple[str, ...] = ()
    continuations: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    gold: int = -1
    answer: str = ""

    def after(self, examples: str) -> Question:
        """Return the question preceded by examples."""
        contexts = tuple(examples + context for context in self.contexts)
        return replace(self, context=examples + self.context, contexts=contexts)


@dataclass(frozen=True, slots=True)
class Task:
    """The questions of a file, all in one format.

    name: name of the file without its extension.
    """

    name: str
    kind: Kind
    questions: tuple[Question, ...]
    has_lengths: bool = True  # a score normalized by the length of the choice has a meaning

    @property
    def is_generated(self) -> bool:
        return self.kind == "gsm8k"


def read_task(path: Path, *, limit: int | None = None, few_shot: int = 0, few_shot_from: Path | None = None) -> Task:
    """Read the task in a file of JSON lines, all in one format. Raises UsageError naming the line that is wrong.

    limit: read only this many questions from the start.
    few_shot: number of examples before each question. They are the first lines of few_shot_from, or else of the file
        itself, whose questions are then left out.
    """
    kind, questions = _read(path)
    if few_shot:
        example_kind, examples = (kind, questions) if few_shot_from is None else _read(few_shot_from)
        source = few_shot_from or path
        if example_kind != kind:
            raise UsageError(f"{source} has questions of the format {example_kind}, but {path} has {kind}")
        if len(examples) < few_shot + (few_shot_from is None):
            raise UsageError(
                f"{source} has {len(examples)} questions, too few for {few_shot} examples; lower --few-shot"
            )
        shown = "".join(example.shown + "\n\n" for example in examples[:few_shot])
        rest = questions[few_shot:] if few_shot_from is None else questions
        questions = [question.after(shown) for question in rest]
    return Task(path.stem, kind, tuple(questions[:limit]), has_lengths=kind != "winogrande")


def _read(path: Path) -> tuple[Kind, list[Question]]:
    lines = read_limited(path).split(b"\n")
    kind: Kind | None = None
    questions: list[Question] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        record = _record(line, where)
        found = _kind_of(record)
        if found is None:
            raise UsageError(
                f"{where} has the fields {', '.join(record) or 'none'}, which match none of the formats: {_FORMATS}"
            )
        if kind is not None and found != kind:
            raise UsageError(f"{where} is of the format {found}, but earlier lines are of {kind}; use a file for each")
        kind = found
        try:
            questions.append(_READERS[kind](record))
        except _WrongFieldError as error:
            raise UsageError(f"{where}: {error}") from None
    if kind is None:
        raise UsageError(f"{path} has no questions")
    return kind, questions


def _record(line: bytes, where: str) -> _Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where} is not a JSON object")
    return record


_FORMATS = (
    "HellaSwag (ctx or ctx_a, endings, label), ARC (question, choices, answerKey), MMLU (question, choices, answer), "
    "Winogrande (sentence, option1, option2, answer), GSM8K (question, answer), or query, choices, gold"
)


def _kind_of(record: _Record) -> Kind | None:
    names = record.keys()
    kinds: list[tuple[Kind, set[str]]] = [
        ("hellaswag", {"endings", "label"}),
        ("winogrande", {"sentence", "option1", "option2", "answer"}),
        ("arc", {"question", "answerKey"}),
        ("mmlu", {"question", "choices", "answer"}),
        ("choices", {"query", "choices", "gold"}),
        ("gsm8k", {"question", "answer"}),
    ]
    return next((kind for kind, needed in kinds if needed <= names), None)


class _WrongFieldError(Exception):
    """A field of a line has the wrong type or value."""


def _text(record: _Record, name: str, default: str | None = None) -> str:
    value = record.get(name, default)
    if not isinstance(value, str):
        raise _WrongFieldError(f"{name} is {value!r:.60}, not a string")
    return value


def _texts(value: object, name: str) -> list[str]:
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(item, str) for item in value):
        raise _WrongFieldError(f"{name} is {value!r:.60}, not a list of two or more strings")
    return value


def _index(value: object, name: str, count: int, labels: Sequence[str] = ()) -> int:
    """Convert a number, its digits, or a label to an index."""
    if isinstance(value, str) and value in labels:
        return labels.index(value)
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
        raise _WrongFieldError(f"{name} is {value!r:.60}, which names none of the {count} choices")
    return number


def _choices(context: str, choices: Sequence[str], gold: int) -> Question:
    """Make a question whose choices follow the same context and a space."""
    continuations = tuple(" " + choice for choice in choices)
    return Question(
        context=context,
        shown=context + continuations[gold],
        contexts=(context,) * len(choices),
        continuations=continuations,
        choices=tuple(choices),
        gold=gold,
    )


def _plain(text: str) -> str:
    """Remove WikiHow's markup from a text, as the harness does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(record: _Record) -> Question:
    endings = _texts(record["endings"], "endings")
    if "ctx_a" in record:
        context = _text(record, "ctx_a") + " " + _text(record, "ctx_b", "").capitalize()
    else:
        context = _text(record, "ctx")
    activity = record.get("activity_label")
    query = _plain(context if activity is None else f"{_text(record, 'activity_label')}: {context}")
    return _choices(query, [_plain(ending) for ending in endings], _index(record["label"], "label", len(endings)))


def _arc(record: _Record) -> Question:
    question = record["question"]
    if isinstance(question, dict):  # the files of AI2 themselves
        entries = question.get("choices")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise _WrongFieldError("question.choices is not a list of objects with text and label")
        texts = _texts([entry.get("text") for entry in entries], "question.choices")
        labels = _texts([entry.get("label") for entry in entries], "question.choices")
        stem = _text(question, "stem")
    else:
        choices = record.get("choices")
        if not isinstance(choices, dict):
            raise _WrongFieldError("choices is not an object with text and label")
        texts, labels = (_texts(choices.get(name), f"choices.{name}") for name in ("text", "label"))
        stem = _text(record, "question")
    if len(texts) != len(labels):
        raise _WrongFieldError(f"choices has {len(texts)} texts and {len(labels)} labels")
    key = record["answerKey"]
    if key not in labels:
        raise _WrongFieldError(f"answerKey is {key!r:.60}, which names none of the {len(labels)} choices")
    return _choices(f"Question: {stem}\nAnswer:", texts, labels.index(key))


def _mmlu(record: _Record) -> Question:
    choices = _texts(record["choices"], "choices")
    if len(choices) > len(LETTERS):
        raise _WrongFieldError(f"choices has {len(choices)} texts; at most {len(LETTERS)} have a letter")
    letters = LETTERS[: len(choices)]
    lines = [f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True)]
    context = "\n".join([_text(record, "question").strip(), *lines, "Answer:"])
    return _choices(context, list(letters), _index(record["answer"], "answer", len(choices), list(letters)))


def _winogrande(record: _Record) -> Question:
    """Make a question whose choices complete the beginning of a sentence. The rest of the sentence is the same for all
    choices, and is scored.
    """
    sentence, options = _text(record, "sentence"), [_text(record, name) for name in ("option1", "option2")]
    before, found, rest = sentence.partition("_")
    if not found:
        raise _WrongFieldError(f"sentence {sentence!r:.60} has no _ for the options")
    if record["answer"] not in ("1", "2", 1, 2):
        raise _WrongFieldError(f"answer is {record['answer']!r:.60}; it must be 1 or 2")
    gold, rest = int(record["answer"]) - 1, rest.strip()
    contexts = tuple(before + option for option in options)
    shown = f"{contexts[gold]} {rest}"
    return Question("", shown, contexts, (" " + rest,) * 2, tuple(options), gold)


def _gsm8k(record: _Record) -> Question:
    context, answer = f"Question: {_text(record, 'question')}\nAnswer:", _text(record, "answer")
    return Question(context, f"{context} {answer}", answer=answer)


def _written_out(record: _Record) -> Question:
    choices = _texts(record["choices"], "choices")
    return _choices(_text(record, "query"), choices, _index(record["gold"], "gold", len(choices)))


_READERS: dict[Kind, Callable[[_Record], Question]] = {
    "hellaswag": _hellaswag,
    "arc": _arc,
    "mmlu": _mmlu,
    "winogrande": _winogrande,
    "gsm8k": _gsm8k,
    "choices": _written_out,
}

# GSM8K: the end of an answer, the number after the mark and the last number, and what is not compared.
STOPS = ("Question:", "</s>", "<|im_end|>")
_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_NOT_COMPARED = (re.compile(r","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))


def strict_answer(text: str) -> str:
    """Return the number after the first ####, or an answer that matches nothing."""
    found = _MARKED.search(text)
    return found[1].strip() if found else "[invalid]"


def flexible_answer(text: str) -> str:
    """Return the last number in the text."""
    found = _NUMBER.findall(text)
    return next((part for part in found[-1] if part), "[invalid]").strip() if found else "[invalid]"


def is_same_answer(found: str, wanted: str) -> bool:
    """Compare two answers, ignoring commas, dollar signs, anything before ####, and a final full stop."""
    for pattern in _NOT_COMPARED:
        found, wanted = pattern.sub("", found), pattern.sub("", wanted)
    return found.lower() == wanted.lower()
