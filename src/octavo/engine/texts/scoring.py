"""Scores of pairs of texts: what to compute for each pair, and how to derive its score."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from octavo.batch import Float32
from octavo.engine.texts.text_model import TextModel, sigmoid
from octavo.errors import UsageError
from octavo.generation_request import PoolingParams
from octavo.prompt import Prompt
from octavo.tokenizer.tokenizer import Tokenizer, TooManyTokensError

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

# The prompt of Qwen3-Reranker (arXiv 2506.05176, and its model card).
_YES_NO_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
)
_YES_NO_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Options for scoring pairs.

    truncate_to: most tokens of a prompt; the second text of a longer one is truncated. None if a longer one is an
    error.
    instruction: the criterion by which a causal reranker judges.
    """

    truncate_to: int | None = None
    instruction: str = DEFAULT_INSTRUCTION


def score_options(truncate_to: int | None, instruction: str | None) -> ScoreOptions:
    """Check the options for scoring.

    truncate_to: -1 for as many tokens as fit. Raises UsageError for another number below 1.
    """
    if truncate_to is not None and truncate_to < 1 and truncate_to != -1:
        message = f"truncate_prompt_tokens is {truncate_to}; it must be at least 1, or -1 for as many as fit"
        raise UsageError(message, param="truncate_prompt_tokens", code="integer_below_min_value")
    limit = sys.maxsize if truncate_to == -1 else truncate_to
    return ScoreOptions(limit, DEFAULT_INSTRUCTION if instruction is None else instruction)


def pairs_of(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair one text with each of many, or two lists of the same length item by item. Raises UsageError."""
    first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
    for name, texts in (("data_1", first), ("data_2", second)):
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None or not texts:
            message = f"{name} must be a string or a list of one or more strings, not {wrong!r:.80}"
            raise UsageError(message, param=name, code="invalid_type")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        message = (
            f"data_1 has {len(first)} texts and data_2 has {len(second)}; give one text in data_1, or the same number "
            "as in data_2"
        )
        raise UsageError(message, param="data_1", code="invalid_value")
    return list(zip(first, second, strict=True))


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The vectors to compute for pairs, as (prompt, parameters), and how to derive the pairs' scores.

    pairs: the indices of each pair's vectors.
    The score of late interaction takes the largest product of each token in the first text with a token in the second,
    and sums these over the first text. Khattab and Zaharia, arXiv 2004.12832.
    """

    model: TextModel
    prompts: list[tuple[Prompt, PoolingParams]]
    pairs: list[tuple[int, ...]]
    num_truncated: int = field(default=0)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all prompts."""
        return sum(len(prompt) for prompt, _ in self.prompts)

    def scores(self, vectors: Sequence[Float32]) -> list[float]:
        """Return the score of each pair from the vectors of the prompts."""
        return [self._score([vectors[i] for i in numbers]) for numbers in self.pairs]

    def _score(self, vectors: list[Float32]) -> float:
        if self.model.scoring == "cosine":
            a, b = (vector.astype(np.float64) for vector in vectors)
            return float(a @ b / ((np.linalg.norm(a) * np.linalg.norm(b)) or 1.0))
        if self.model.scoring == "dot":
            return float(vectors[0].astype(np.float64) @ vectors[1])
        if self.model.scoring == "late":
            query, document = (vector.astype(np.float64).reshape(-1, self.model.width) for vector in vectors)
            return float((query @ document.T).max(axis=1).sum())
        if self.model.scoring == "label" and self.model.activation == "sigmoid":
            return float(sigmoid(vectors[0])[0])
        return float(vectors[0][0])


def plan_scores(
    model: TextModel,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    max_tokens: int,
    options: ScoreOptions = ScoreOptions(),
) -> ScorePlan:
    """Plan the vectors for the scores of pairs.

    pairs: queries and documents.
    max_tokens: the longest prompt of this model.
    Raises UsageError if the model cannot score pairs, or for a pair that is too long.
    """
    if model.scoring == "none":
        reason = f"has {model.num_labels} labels, not one" if model.num_labels else "cannot answer yes or no"
        message = f"this model cannot score pairs: it {reason}; use a cross-encoder, a reranker or an embedding model"
        raise UsageError(message, param="model", code="unsupported_model")
    limit = max_tokens if options.truncate_to is None else min(options.truncate_to, max_tokens)
    encoder = _Encoder(model, tokenizer, limit, options)
    if model.scoring in ("cosine", "dot", "late"):
        task: Literal["embed", "token_embed"] = "token_embed" if model.scoring == "late" else "embed"
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        places = {text: i for i, text in enumerate(texts)}
        prompts = [(encoder.text(text), PoolingParams(task=task)) for text in texts]
        numbers: list[tuple[int, ...]] = [(places[a], places[b]) for a, b in pairs]
    else:
        make = encoder.question if model.scoring == "yes_no" else encoder.pair
        prompts = [make(*pair) for pair in pairs]
        numbers = [(i,) for i in range(len(pairs))]
    whole = [(Prompt(token_ids), params) for token_ids, params in prompts]
    return ScorePlan(model, whole, numbers, encoder.num_truncated)


class _Encoder:
    """Encodes texts and pairs into at most `limit` token ids. Longer ones are truncated if the options allow it."""

    def __init__(self, model: TextModel, tokenizer: Tokenizer, limit: int, options: ScoreOptions) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._limit = limit
        self._options = options
        self.num_truncated = 0
        self._query: tuple[str, list[int]] = ("", [])  # the last one, because many pairs share it

    def text(self, text: str) -> list[int]:
        ids = self._ids(text)
        prefix, suffix = self._tokenizer.prefix_ids, self._tokenizer.suffix_ids
        return self._tokenizer.padded([*prefix, *self._fit(ids, len(prefix) + len(suffix)), *suffix])

    def pair(self, query: str, document: str) -> tuple[list[int], PoolingParams]:
        tokenizer = self._tokenizer
        if self._query[0] != query:
            self._query = (query, self._ids(query))
        head = [*tokenizer.prefix_ids, *self._query[1], *tokenizer.separator_ids]
        second = self._fit(self._ids(document), len(head) + len(tokenizer.suffix_ids))
        start = len(head) if self._model.num_token_types > 1 and tokenizer.marks_second else 0
        return [*head, *second, *tokenizer.suffix_ids], PoolingParams(task="score", second_start=start)

    def question(self, query: str, document: str) -> tuple[list[int], PoolingParams]:
        """Return the prompt for a query and a document. No part of their texts can become a control token."""
        tokenizer = self._tokenizer
        fields = {"query": query, "document": document, "instruction": self._options.instruction}
        rendered = _YES_NO_PROMPT.format(**{name: tokenizer.guard(text) for name, text in fields.items()})
        start = self._ids(rendered, parse_special=True)
        end = tokenizer.encode(_YES_NO_END, add_special_tokens=False, parse_special=True)
        return [*self._fit(start, len(end)), *end], PoolingParams(task="score", pooling="last")

    def _ids(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the tokens of a text. A text that is too long and must not be truncated is rejected early."""
        most = self._limit if self._options.truncate_to is None else None
        try:
            return self._tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special, max_tokens=most)
        except TooManyTokensError as error:
            raise self._too_long(error.found) from None

    def _fit(self, ids: list[int], others: int) -> list[int]:
        """Truncate the tokens to leave room for `others` tokens, which are kept whole."""
        excess = len(ids) + others - self._limit
        if excess <= 0:
            return ids
        if self._options.truncate_to is None or excess >= len(ids):
            raise self._too_long(str(len(ids) + others))
        self.num_truncated += excess
        return ids[: len(ids) - excess]

    def _too_long(self, num_tokens: str) -> UsageError:
        message = f"a pair has {num_tokens} tokens, but this model takes {self._limit}: shorten it"
        if self._options.truncate_to is None:
            message += ", or set truncate_prompt_tokens"
        return UsageError(message, code="context_length_exceeded")
