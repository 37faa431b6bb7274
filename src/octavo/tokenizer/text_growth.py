"""Bounds on how much a `tokenizer.json` may lengthen a text, known before any of its steps runs.

A 5 KB normalizer can double a text 50 times. Therefore the growth of each step has a known bound, and a text is only
normalized once its bound, or else its measured size, is known to be small enough. Sizes are in bytes of UTF-8.
Source of the bounds: the `normalizers` and `pre_tokenizers` of the tokenizers library, version 0.23; for Unicode's
normalization forms Unicode Standard Annex 15, table "Maximum Expansion Factors".
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, TypeAlias

import tokenizers

from octavo.errors import ModelLoadError, OctavoError
from octavo.tokenizer.quiet_thread import run_quietly
from octavo.tokenizer.vocabulary import library_errors_as

MAX_STEPS = 256  # most normalizers, pre-tokenizers and decoders
MAX_NORMALIZED_BYTES = 32 << 20  # the library keeps 16 more bytes per byte
MAX_LETTER_BYTES = 16  # maximum size of one letter, since added tokens can split a text into letters
MAX_SPLIT_GROWTH = 64  # in pre-tokenizers; published ones have at most 16
MAX_AFFIX_CHARS = 64  # for the marks inside and at the ends of words
MAX_WORD_CHARS = 10_000  # WordPiece tries every part of a word
_CHUNK_CHARS = 1 << 14

TEXT_PARTS = ("normalizer", "pre_tokenizer", "added_tokens")
MODEL_PARTS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word")

TextStep: TypeAlias = "Mapping[str, Any]"
"""A normalizer or pre-tokenizer, as in `tokenizer.json`."""


class GrowthError(OctavoError):
    """A text would become too large. The message is the second half of a sentence about the text."""


def _of_replace(step: TextStep) -> int:
    content, pattern = len(step["content"].encode()), step["pattern"]
    if "Regex" in pattern:  # it may match the empty string before each character and at the end
        return 1 + 2 * content
    if not (size := len(pattern["String"].encode())):
        raise ValueError("an empty pattern")
    return -(-content // size) or 1


def _of_charsmap(step: TextStep) -> int:
    """Return the growth of SentencePiece's table.

    The table contains the size of a search tree, the tree itself, and replacements that end in zero bytes.
    """
    table = b64decode(step["precompiled_charsmap"], validate=True)
    replacements = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, replacements.split(b"\0")), default=1) or 1


_NORMALIZERS: Mapping[str, Callable[[TextStep], int]] = {
    **dict.fromkeys(("NFC", "NFD"), lambda _: 3),
    **dict.fromkeys(("NFKC", "NFKD"), lambda _: 11),
    **dict.fromkeys(("Strip", "StripAccents", "Nmt"), lambda _: 1),
    "Lowercase": lambda _: 2,
    "BertNormalizer": lambda _: 3 * 3 * 2,  # accents, spaces around a CJK character, small letters
    "ByteLevel": lambda _: 2,
    "Replace": _of_replace,
    "Prepend": lambda step: 1 + len(step["prepend"].encode()),
    "Precompiled": _of_charsmap,
}
_PRE_TOKENIZERS: Mapping[str, Callable[[TextStep], int]] = {
    **dict.fromkeys(("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts"), lambda _: 1),
    **dict.fromkeys(("Punctuation", "Digits", "Split", "CharDelimiterSplit", "FixedLength"), lambda _: 1),
    "ByteLevel": lambda step: 4 if step.get("add_prefix_space", True) else 2,
    "Metaspace": lambda _: 4 + 4,  # for a space, and at the start of a piece
}


def _flat(step: TextStep | None, inner: str) -> Iterator[TextStep]:
    """Yield the steps of nested sequences, in order."""
    stack = [step] if step is not None else []
    while stack:
        item = stack.pop()
        if item["type"] == "Sequence":
            stack += reversed(item[inner])
        else:
            yield item


@dataclass(frozen=True)
class TextGrowth:
    """The steps of a normalizer, with the maximum growth of each as a factor. Thread-safe."""

    steps: Sequence[TextStep]
    factors: Sequence[int]

    @cached_property
    def factor(self) -> int:
        """Maximum growth of the whole normalizer."""
        return prod(self.factors)

    @cached_property
    def _normalizers(self) -> Sequence[tokenizers.normalizers.Normalizer]:
        model = {"type": "BPE", "vocab": {}, "merges": []}
        return [
            tokenizers.Tokenizer.from_str(
                json.dumps({"version": "1.0", "added_tokens": [], "normalizer": step, "model": model})
            ).normalizer
            for step in self.steps
        ]

    def check(self, text: str) -> None:
        """Raise GrowthError if the normalized text may have more than MAX_NORMALIZED_BYTES.

        Most texts are short enough for any growth that the steps can cause. Other texts are normalized step by step in
        small chunks, and a step does not run if its result may be too large.
        """
        if 4 * len(text) * self.factor > MAX_NORMALIZED_BYTES:
            self.measure(text)

    def measure(self, text: str) -> int:
        """Return the size of the normalized text. Raises GrowthError if it may be too large."""
        total = 0
        for begin in range(0, len(text), _CHUNK_CHARS):
            chunk = text[begin : begin + _CHUNK_CHARS]
            for normalizer, factor in zip(self._normalizers, self.factors, strict=True):
                if len(chunk.encode()) * factor > MAX_NORMALIZED_BYTES:
                    raise _too_large()
                chunk = normalizer.normalize_str(chunk)
            total += len(chunk.encode())
            if total > MAX_NORMALIZED_BYTES:
                raise _too_large()
        return total


NO_GROWTH = TextGrowth((), ())


def _too_large() -> GrowthError:
    return GrowthError(f"the model's normalizer makes more than {MAX_NORMALIZED_BYTES:,} bytes of this text; send less")


def growth_of(path: object, parts: Mapping[str, Any]) -> TextGrowth:
    """Check the parts of a `tokenizer.json` that change texts, and return its normalizer's growth.

    parts: TEXT_PARTS of the file, and `model` with MODEL_PARTS

    Raises ModelLoadError naming the file if steps are unknown or too many, if growth exceeds the limits, or if merges
    are left out at random.
    """
    try:
        steps = _bounded(path, parts.get("normalizer"), "normalizers", _NORMALIZERS)
        growth = TextGrowth(steps, [_NORMALIZERS[step["type"]](step) for step in steps])
        splits = _bounded(path, parts.get("pre_tokenizer"), "pretokenizers", _PRE_TOKENIZERS)
        split_growth = prod(_PRE_TOKENIZERS[step["type"]](step) for step in splits)
        contents = [token["content"] for token in parts.get("added_tokens") or ()]
        num_bytes = sum(len(content.encode()) for content in contents)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelLoadError(f"{path} is not a tokenizer: {type(error).__name__}: {error}") from None
    if split_growth > MAX_SPLIT_GROWTH:
        raise ModelLoadError(
            f"{path}: the pre_tokenizer may multiply a text by {split_growth:,}; the limit is {MAX_SPLIT_GROWTH}"
        )
    if num_bytes * growth.factor > MAX_NORMALIZED_BYTES:  # the library normalizes them when loading the file
        raise ModelLoadError(f"{path}: the normalizer may multiply the added tokens by {growth.factor:.3g}")
    try:
        with library_errors_as(ModelLoadError, f"{path} cannot encode text"):
            letter_bytes = run_quietly(partial(growth.measure, "a"))
    except GrowthError:
        letter_bytes = MAX_NORMALIZED_BYTES
    if letter_bytes > MAX_LETTER_BYTES:
        size = f"{letter_bytes:,} bytes or more"
        raise ModelLoadError(f"{path}: the normalizer makes {size} of one letter; the limit is {MAX_LETTER_BYTES}")
    _check_model(path, parts.get("model") or {})
    return growth


def _bounded(path: object, step: TextStep | None, inner: str, known: Mapping[str, Any]) -> list[TextStep]:
    part = "normalizer" if known is _NORMALIZERS else "pre_tokenizer"
    steps: list[TextStep] = []
    for item in _flat(step, inner):
        if item["type"] not in known:
            raise ModelLoadError(f"{path}: the {part} has a step {item['type']!r:.40}, which Octavo does not support")
        steps.append(item)
        if len(steps) > MAX_STEPS:
            raise ModelLoadError(f"{path}: the {part} has more than {MAX_STEPS} steps, the limit")
    return steps


def _check_model(path: object, model: Mapping[str, Any]) -> None:
    """Check the parts of a model that make encoding random, or that make it slow or large regardless of the text."""
    if dropout := model.get("dropout"):
        problem = "which leaves out merges at random; it is for training: remove it"
        raise ModelLoadError(f"{path}: model.dropout is {dropout!r:.40}, {problem}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(affix := model.get(name), str) and len(affix) > MAX_AFFIX_CHARS:
            raise ModelLoadError(f"{path}: model.{name} has {len(affix):,} characters; the limit is {MAX_AFFIX_CHARS}")
    if isinstance(size := model.get("max_input_chars_per_word"), int) and size > MAX_WORD_CHARS:
        raise ModelLoadError(f"{path}: model.max_input_chars_per_word is {size:,}; the limit is {MAX_WORD_CHARS:,}")
