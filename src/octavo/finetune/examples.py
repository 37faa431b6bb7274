"""Reads training data as token ids, and marks the tokens that are answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from octavo.backends.learned_text import LearnedText
from octavo.engine.texts.prompt_encoder import OWN_VARIABLES, PromptEncoder, template_eos_id
from octavo.errors import ModelLoadError, UsageError
from octavo.tokenizer.tokenizer import Tokenizer

MAX_LINE_BYTES = 1 << 24
_FORMS = '{"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}'


@dataclass(slots=True)
class Examples:
    """The examples of a file, and the line number of each, counting from 1.

    num_cut: examples whose end was cut off.
    num_dropped: examples without an answer that fits.
    digest: digest of the file.
    """

    texts: list[LearnedText] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    num_lines: int = 0
    num_cut: int = 0
    num_dropped: int = 0
    digest: str = ""


def read_examples(path: Path, tokenizer: Tokenizer, max_tokens: int) -> Examples:
    """Read all lines of a file. Raises UsageError naming file, line and reason.

    max_tokens: maximum length of an example. Longer plain texts are split into several; other examples lose their end.
    """
    reader = _Reader(tokenizer)
    examples, digest = Examples(), sha256()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if not line.strip():
                    continue
                examples.num_lines += 1
                try:
                    found = list(reader.read(_record(line)))
                except (UsageError, ModelLoadError) as error:
                    raise UsageError(f"{path}: line {number}: {error}", param="data") from error
                for example in found:
                    _take(examples, number, example, max_tokens)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", param="data") from error
    finally:
        reader.close()
    examples.digest = digest.hexdigest()
    if not examples.texts:
        raise UsageError(
            f"{path}: no line has an answer within {max_tokens} tokens; write {_FORMS}, one object per line, or raise "
            "--sequence-length",
            param="data",
        )
    return examples


@dataclass(frozen=True, slots=True)
class _Marked:
    """Token ids with the spans that are trained on.

    is_plain: everything is trained on, and the text may be cut anywhere.
    """

    ids: Sequence[int]
    spans: Sequence[tuple[int, int]]
    is_plain: bool = False


def _take(examples: Examples, line: int, marked: _Marked, max_tokens: int) -> None:
    is_learned = np.zeros(len(marked.ids), np.bool_)
    for begin, end in marked.spans:
        is_learned[begin:end] = True
    ids = np.array(marked.ids, np.int32)
    if not marked.is_plain:
        examples.num_cut += len(ids) > max_tokens
    step = max_tokens if marked.is_plain else max(len(ids), 1)
    for begin in range(0, len(ids), step):
        piece = slice(begin, begin + max_tokens)
        text = LearnedText(ids[piece], is_learned[piece])
        if text.num_learned:
            examples.texts.append(text)
            examples.lines.append(line)
        elif not marked.is_plain:
            examples.num_dropped += 1


def _record(line: bytes) -> Mapping[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise UsageError(f"it has {len(line):,} bytes; the limit is {MAX_LINE_BYTES:,}: split it into several lines")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise UsageError(f"it is {record!r:.40}; it must be an object: {_FORMS}")
    return record


class _Reader:
    """Turns a line, in any of its formats, into marked token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, template_eos_id(tokenizer))
        self._end = tokenizer.suffix_ids or tuple(token for token in [template_eos_id(tokenizer)] if token is not None)

    def close(self) -> None:
        self._encoder.close()

    def read(self, record: Mapping[str, Any]) -> Iterator[_Marked]:
        """Yield the examples of a line.

        There is only one, except for a conversation whose template hides parts of earlier answers.
        """
        prompt, completion, messages = (record.get(key) for key in ("prompt", "completion", "messages"))
        if isinstance(messages, list):
            yield from self._conversation(messages, 0, record)
        elif isinstance(prompt, list) and isinstance(completion, list):
            yield from self._conversation([*prompt, *completion], len(prompt), record)
        elif isinstance(prompt, str) and isinstance(completion, str):
            yield self._completion(prompt, completion)
        elif isinstance(record.get("text"), str):
            ids = self._ended(self._tokenizer.encode(record["text"], parse_special=True))
            yield _Marked(ids, [(0, len(ids))], is_plain=True)
        else:
            keys = ", ".join(map(repr, list(record)[:5])) or "nothing"
            raise UsageError(f"it has {keys:.120}; write {_FORMS}")

    def _completion(self, prompt: str, completion: str) -> _Marked:
        before = self._tokenizer.encode(prompt, parse_special=True)
        ids = self._ended(self._tokenizer.encode(prompt + completion, parse_special=True))
        return _Marked(ids, [(_common(before, ids), len(ids))])

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if ids[-1:] and ids[-1] in self._tokenizer.eos_token_ids else [*ids, *self._end]

    def _conversation(self, messages: list[Any], first: int, record: Mapping[str, Any]) -> Iterator[_Marked]:
        """Yield the examples of a conversation, where the assistant's messages from `first` on are answers.

        An opening message of the assistant answers nothing and is not trained on.
        """
        answers = [i for i, message in enumerate(messages) if i >= max(first, 1) and _is_answer(message)]
        if not answers:
            raise UsageError("the conversation has no assistant message after another message: nothing to learn")
        turns = [self._turn(messages[: i + 1], record) for i in answers]
        whole, _ = turns[-1]
        if all(list(whole[: len(ids)]) == list(ids) for ids, _ in turns):
            yield _Marked(whole, [span for _, span in turns])
        else:  # the template shows earlier answers otherwise, as those of models that think do
            for ids, span in turns:
                yield _Marked(ids, [span])

    def _turn(self, messages: list[Any], record: Mapping[str, Any]) -> tuple[list[int], tuple[int, int]]:
        """Return the conversation up to an answer, and the span of that answer with the token that ends it."""
        variables = record.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict) or variables.keys() & OWN_VARIABLES:
            own = ", ".join(sorted(OWN_VARIABLES))
            raise UsageError(f"chat_template_kwargs is {variables!r:.80}; it must be an object without {own}")
        extra = variables | {key: record[key] for key in ("tools", "documents") if record.get(key) is not None}
        before = self._encoder.encode_chat(messages[:-1], add_generation_prompt=True, **extra)
        ids = self._encoder.encode_chat(messages, add_generation_prompt=False, **extra)
        begin = _common(before, ids)
        if begin < len(before):
            # What the model is given for its answer differs from what the answer begins with.
            asked = self._encoder.encode_chat(messages[:-1], add_generation_prompt=False, **extra)
            if _common(asked, ids) < len(asked):
                raise UsageError(
                    f"the chat template renders earlier messages differently once message {len(messages)} follows; "
                    'write this line as {"prompt": ..., "completion": ...} with the text that the template makes'
                )
        ends = [i for i in range(begin, len(ids)) if ids[i] in self._tokenizer.eos_token_ids]
        return ids, (begin, ends[-1] + 1 if ends else len(ids))


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading tokens that both have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
