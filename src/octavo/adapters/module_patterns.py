"""Numbers assigned by patterns of module names, as in PEFT's `rank_pattern`. Matching any pattern takes linear time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from octavo.errors import ModelLoadError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_PATTERNS = 1 << 12
MAX_EXPRESSIONS = 64  # patterns with more than names and dots
MAX_EXPRESSION_CHARS = 512

_NAME = re.compile(r"\^?(?:[\w-]|\\?\.)*\$?")
_BEFORE = r"(?:.*\.)?"  # a pattern matches the whole name of a module, or its end after a dot
_ESCAPES = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_INNER_GROUP = re.compile(r"\([^()]*\)")
_END = 256  # a token after the byte tokens, required by llguidance


class ModulePatterns:
    """Looks up a setting's number for a module name by regular expressions.

    Plain names, by far the most frequent patterns, are left to `re`. Other patterns become automata, because `re` may
    take forever to find that `(a+)+` does not match.
    """

    def __init__(self, where: str, numbers: Mapping[str, float]) -> None:
        """Compile the patterns.

        where: file and key, for errors.

        Raises ModelLoadError naming a pattern that is wrong or not supported.
        """
        expressions = [pattern for pattern in numbers if not _NAME.fullmatch(pattern)]
        if len(numbers) > MAX_PATTERNS or len(expressions) > MAX_EXPRESSIONS:
            raise ModelLoadError(
                f"{where} has {len(numbers)} patterns, {len(expressions)} of them with more than names and dots; at "
                f"most {MAX_PATTERNS} and {MAX_EXPRESSIONS} are allowed: write the names of modules"
            )
        self._rules = [(_matcher(where, pattern), number) for pattern, number in numbers.items()]

    def find(self, module: str, default: float) -> float:
        """Return the number of the first pattern that matches.

        Raises ModelLoadError for a pattern whose automaton needs too many states.
        """
        return next((number for matches, number in self._rules if matches(module)), default)


def _matcher(where: str, pattern: str) -> Callable[[str], bool]:
    if _NAME.fullmatch(pattern):
        compiled = re.compile(f"{_BEFORE}(?:{pattern})")
        return lambda module: compiled.fullmatch(module) is not None
    # A library that most adapters do not need.
    from llguidance import LLMatcher, LLParserLimits

    if len(pattern) > MAX_EXPRESSION_CHARS:
        raise ModelLoadError(
            f"{where}: {pattern!r:.80} has {len(pattern)} characters, at most {MAX_EXPRESSION_CHARS} are allowed: "
            "write the names of modules"
        )
    limits = LLParserLimits(
        initial_lexer_fuel=100_000, step_lexer_fuel=20_000, max_lexer_states=1_000, verbose_errors=False
    )
    grammar = LLMatcher.grammar_from_regex(_without_anchors(pattern))
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ModelLoadError(
            f"{where}: {pattern!r:.80} is not a regular expression, or has look-around, backreferences or anchors "
            "inside; write the names of modules"
        )

    def matches(module: str) -> bool:
        matcher.reset()
        tokens = list(module.encode())
        count = matcher.try_consume_tokens(tokens)
        if matcher.is_error():
            raise ModelLoadError(f"{where}: {pattern!r:.80} is too complex; write the names of modules")
        return count == len(tokens) and matcher.is_accepting()

    return matches


def _without_anchors(pattern: str) -> str:
    """Return the pattern for whole names: any prefix may come first unless the pattern begins with `^`.

    A `$` matches the end of a name.
    """
    outside = _ESCAPES.sub("", pattern)
    while outside != (outside := _INNER_GROUP.sub("", outside)):
        pass
    if "|" in outside:  # an anchor would belong to one of the alternatives
        return f"{_BEFORE}(?:{pattern})"
    before = "" if pattern.startswith("^") else _BEFORE
    return f"{before}(?:{pattern.removeprefix('^')[: -1 if outside.endswith('$') else None]})"


@cache
def _bytes() -> LLTokenizer:
    """Return a vocabulary with one token per byte."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_ByteVocabulary()))


class _ByteVocabulary:
    """A vocabulary of single bytes, with the interface that llguidance needs."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(_END)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
