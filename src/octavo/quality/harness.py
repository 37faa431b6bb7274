"""Runs tasks on a model: accuracy of choices and exact match of answers, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.quality.language_model import Counted, LanguageModel, Likelihood
from octavo.quality.tasks import STOPS, Task, flexible_answer, is_same_answer, strict_answer
from octavo.sampling_params import SamplingParams

MAX_ANSWER_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Share:
    """A fraction of the questions.

    standard_error: error of the mean over this many questions; NaN for a single question.
    """

    value: float
    standard_error: float

    @classmethod
    def of(cls, hits: Sequence[bool]) -> Share:
        count, value = len(hits), sum(hits) / len(hits)
        error = math.sqrt(value * (1 - value) / (count - 1)) if count > 1 else math.nan
        return cls(value, error)


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The figures of a task by name.

    acc: the choice with the highest log-probability is right.
    acc_norm: the same, with log-probabilities divided by the number of characters of the choice.
    strict_match: the number after #### is right.
    flexible_extract: the last number of the answer is right.
    num_truncated: prompts whose beginning was cut because they were too long for the model.
    """

    task: str
    kind: str
    num_questions: int
    figures: dict[str, Share]
    num_truncated: int = 0


def run_task(model: LanguageModel, task: Task, counted: Counted | None = None) -> TaskReport:
    """Ask all questions of a task. Raises UsageError for a question that the model cannot handle."""
    before = model.num_truncated
    ask = _generated if task.is_generated else _chosen
    figures = ask(model, task, counted)
    return TaskReport(task.name, task.kind, len(task.questions), figures, model.num_truncated - before)


def _chosen(model: LanguageModel, task: Task, counted: Counted | None) -> dict[str, Share]:
    pairs = [
        model.encode_pair(context, continuation)
        for question in task.questions
        for context, continuation in zip(question.contexts, question.continuations, strict=True)
    ]
    likelihoods = iter(model.likelihoods(pairs, counted))
    plain, normalized = [], []
    for question in task.questions:
        found = [next(likelihoods) for _ in question.choices]
        plain.append(_best(found, [1.0] * len(found)) == question.gold)
        normalized.append(_best(found, [float(len(choice)) for choice in question.choices]) == question.gold)
    figures = {"acc": Share.of(plain)}
    return figures | {"acc_norm": Share.of(normalized)} if task.has_lengths else figures


def _best(found: Sequence[Likelihood], lengths: Sequence[float]) -> int:
    """Return the index of the most likely choice, the first one in a tie."""
    scores = [each.logprob / max(length, 1.0) for each, length in zip(found, lengths, strict=True)]
    return scores.index(max(scores))


def _generated(model: LanguageModel, task: Task, counted: Counted | None) -> dict[str, Share]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS, stop=list(STOPS))
    prompts = [model.encode(question.context) for question in task.questions]
    texts = model.generate(prompts, [params] * len(prompts), counted)

    extractors = {"strict_match": strict_answer, "flexible_extract": flexible_answer}
    return {
        name: Share.of(
            [
                is_same_answer(extract(text), question.answer)
                for text, question in zip(texts, task.questions, strict=True)
            ]
        )
        for name, extract in extractors.items()
    }
