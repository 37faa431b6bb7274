"""Structured outputs: constrains answers with llguidance's masks over the vocabulary.

Grammars are compiled when a request is created, never on the engine's thread. Everything has a limit: the source by
`StructuredOutputsParams`, the compiler and each mask by `_LIMITS`, the time by `_TIMEOUT_S`, and the cache by
`_CACHE_BYTES`. The limit of the cache applies to the estimated sizes of grammars just after compiling. The copies of a
grammar share a lexer that grows with use: by half for ordinary schemas, and at most to the number of states in
`_LIMITS`.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from octavo.batch import token_mask
from octavo.engine.texts.deep_stack import run_on_deep_stack
from octavo.engine.texts.gbnf import GbnfError, is_gbnf
from octavo.engine.texts.gbnf_to_lark import gbnf_to_lark
from octavo.engine.texts.schemas import UnenforceableError, close_objects, enforceable_lark, enforceable_schema
from octavo.errors import OverloadedError, UsageError
from octavo.sampling_params import StructuredOutputsParams
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# With these, a mask takes at most 40 ms, most compilations far less than a second, a lexer state about 2 KB. A row
# has four items for each optional property that may still come: 2,048 of them fit.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    max_grammar_size=50_000,
    max_items_in_row=9_000,
    max_lexer_states=16_000,
    verbose_errors=False,
)
_TIMEOUT_S = 2.0
_MAX_COMPILATIONS = 4  # at the same time
_CACHE_BYTES = 16 * 2**20  # about a hundred schemas
_MAX_MASK_THREADS = 8

# JSON with at most the white space of an indented document in a row; given more, models never stop writing it.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}", "lenient": False}
# Tokens of these texts are allowed or forbidden together if a string may hold all of them. They are llguidance's
# without the line ends of Unicode, which `.` excludes in patterns.
_TEXT = r'[^"\\\x00-\x1F\x7F\x85\u2028\u2029]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", f"{_TEXT}{{1,10}}", f"{_TEXT}{{1,30}}", f"{_TEXT}+"]
_MAX_DEPTH = 96  # levels of a schema; llguidance itself refuses more than 128
_MAX_NAMES = 2048  # properties of one object
_MAX_REPEAT = 10_000  # longer than any answer; no automaton is that large
_MAX_CHARS_SHOWN = 300
# A repetition, or an escape with a code point or property in braces: \x{20000}, \p{Greek}.
_REPETITION = re.compile(r"\\(?:[xuUpP]\{[^{}]*\}|.)|\{(\d+)(?:,(\d*))?\}", re.DOTALL)
# The values of these keywords are data, not schemas.
_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
_LENGTHS = ("minLength", "minItems", "minProperties")


class GrammarCompiler:
    """Compiles and caches the grammars for one model. Thread-safe.

    vocab_size: columns of the logits. Those beyond the tokenizer's ids are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokenizer_lock = threading.Lock()
        self._made_tokenizer: LLTokenizer | None = None
        self._slots = threading.BoundedSemaphore(_MAX_COMPILATIONS)
        self.cache = GrammarCache(_CACHE_BYTES)
        self._filler = MaskFiller(tokenizer.eos_token_ids, vocab_size)

    def compile(self, params: StructuredOutputsParams, *, closed_objects: bool = False) -> GrammarState:
        """Compile a grammar.

        Return the state before the first token, for each sequence to copy. This may take a second.
        closed_objects: see `RequestOptions`.
        Raises UsageError (param `structured_outputs.` and its field, code `invalid_json_schema` or `invalid_grammar`)
        if the grammar is invalid, cannot be enforced, is too large or matches no text, and OverloadedError if too many
        grammars are being compiled.
        """
        source = make_source(params, closed_objects=closed_objects)
        matcher = self.cache.get(source)
        if matcher is None:
            matcher = self._compile(source, self.prepare())
            self.cache.put(source, matcher)
        return GrammarState(matcher, self._filler)

    def _compile(self, source: GrammarSource, tokenizer: LLTokenizer) -> LLMatcher:
        if not self._slots.acquire(timeout=_TIMEOUT_S):
            raise OverloadedError("too many grammars are being compiled; try again", code="server_overloaded")

        def work() -> LLMatcher:
            try:
                matcher = LLMatcher(tokenizer, source.text, log_level=0, limits=_LIMITS)
                matcher.compute_bitmask()  # the first mask is the slowest; all copies share it
                return matcher
            finally:
                self._slots.release()

        try:
            # The compiler recurses once for each rule that refers to another.
            matcher = run_on_deep_stack(work, _TIMEOUT_S)
        except OverloadedError:  # no thread could be started for it
            self._slots.release()
            raise
        if matcher is None:
            raise _refusal(source.field, f"takes longer than {_TIMEOUT_S:g} s to compile; simplify it")
        if matcher.is_stopped() and not matcher.is_accepting():
            reason = _reason(matcher)
            raise _refusal(source.field, f"cannot be enforced: {reason}" if reason else "matches no text at all")
        return matcher

    def prepare(self) -> LLTokenizer:
        """Return the vocabulary in llguidance's form. The first call takes half a second for 150,000 tokens."""
        with self._tokenizer_lock:
            if self._made_tokenizer is None:
                vocabulary = _VocabularyView(self._tokenizer, self._vocab_size)
                self._made_tokenizer = LLTokenizer(
                    TokenizerWrapper(vocabulary),
                    n_vocab=self._vocab_size,
                    eos_token=vocabulary.eos_token_ids,
                    slices=_SLICES,
                )
            return self._made_tokenizer


class GrammarState:
    """The progress of one sequence's answer through its grammar. Not thread-safe, except `copy`.

    error: the reason why nothing can follow although the answer is incomplete, or None.
    """

    def __init__(self, matcher: LLMatcher, filler: MaskFiller) -> None:
        self.matcher = matcher
        self.filler = filler
        self.error: str | None = None

    def copy(self) -> GrammarState:
        """Return a copy of the state for another sequence."""
        return GrammarState(self.matcher.deep_copy(), self.filler)

    @property
    def is_complete(self) -> bool:
        """True if the answer is complete and only the end of text can follow."""
        return self.error is None and self.matcher.is_stopped() and self.matcher.is_accepting()

    def accept(self, token_id: int) -> None:
        """Advance by the next token, which must be allowed by the mask."""
        if self.error is None:
            self.matcher.consume_token(token_id)
            self.check()

    def rows(self, first: int, *, may_end: bool) -> MaskRows:
        """Return the answer's mask rows, beginning with row `first`. They include no drafts yet."""
        return MaskRows(first, self, may_end, [])

    def num_allowed(self, drafts: list[int]) -> int:
        """Return the number of drafts, from the first on, that the grammar allows. An end of text is not counted.

        Nothing follows an end of text, so it does not need a row of its own.
        """
        ends = self.filler.eos_token_ids
        before_end = next((i for i, token_id in enumerate(drafts) if token_id in ends), len(drafts))
        return self.matcher.deep_copy().validate_tokens(drafts[:before_end])

    def check(self) -> None:
        """Set `error` if the grammar is stuck."""
        if self.matcher.is_stopped() and not self.matcher.is_accepting():
            self.error = _reason(self.matcher) or "no token can follow what has been generated"


class MaskRows(NamedTuple):
    """The rows of masks for one answer: what may follow its tokens and each of its drafts.

    first: the first of 1 + len(drafts) rows.
    may_end: whether the end of text may be chosen.
    drafts: the drafts that the grammar allows, see `GrammarState.num_allowed`.
    """

    first: int
    state: GrammarState
    may_end: bool
    drafts: list[int]


class MaskFiller:
    """Computes the masks for the rows of a step, in parallel if there are several answers."""

    def __init__(self, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self.eos_token_ids = eos_token_ids
        self._executor: LLExecutor | None = None
        self._eos_mask = token_mask([token_id for token_id in eos_token_ids if token_id < vocab_size], vocab_size)

    def fill(self, answers: Sequence[MaskRows], masks: NDArray[np.uint32]) -> None:
        """Restrict masks [R, ceil(vocab / 32)] to the tokens that the grammars allow, or to none if a grammar is stuck.

        The grammar states do not advance, even with drafts.
        """
        starts = [0, *accumulate(1 + len(answer.drafts) for answer in answers)]
        allowed = np.zeros((starts[-1], masks.shape[1]), np.uint32)
        if len(allowed) == 1:
            answers[0].state.matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        else:
            self._fill_in_parallel(answers, starts, allowed)
        for (row, state, may_end, drafts), start in zip(answers, starts, strict=False):
            state.check()
            for i, mask in enumerate(allowed[start : start + 1 + len(drafts)], row):
                if state.error is not None:
                    mask[:] = 0
                elif not may_end and np.any(mask & ~self._eos_mask):
                    mask &= ~self._eos_mask
                masks[i] &= mask

    def _fill_in_parallel(self, answers: Sequence[MaskRows], starts: list[int], allowed: NDArray[np.uint32]) -> None:
        if self._executor is None:
            self._executor = LLExecutor(min(os.cpu_count() or 1, _MAX_MASK_THREADS))
        target = allowed.ctypes.data, allowed.strides[0], len(allowed)
        found = list(zip(answers, starts, strict=False))
        plain = [(answer.state.matcher, start) for answer, start in found if not answer.drafts]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *target)
        # On a copy (a microsecond), because a matcher that hits its limits after a wrong draft stays in error.
        drafting = [(each.state.matcher.deep_copy(), start, each.drafts) for each, start in found if each.drafts]
        if drafting:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafting, *target)


class GrammarCache:
    """The most recently used grammars, up to a limit in bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._matchers: OrderedDict[GrammarSource, LLMatcher] = OrderedDict()
        self.num_bytes = 0

    def get(self, source: GrammarSource) -> LLMatcher | None:
        with self._lock:
            if source in self._matchers:
                self._matchers.move_to_end(source)
            return self._matchers.get(source)

    def put(self, source: GrammarSource, matcher: LLMatcher) -> None:
        with self._lock:
            if source not in self._matchers:
                self._matchers[source] = matcher
                self.num_bytes += self._cost(source)
            while self.num_bytes > self._max_bytes:
                oldest, _ = self._matchers.popitem(last=False)
                self.num_bytes -= self._cost(oldest)

    @staticmethod
    def _cost(source: GrammarSource) -> int:
        """Estimate the bytes of a compiled grammar, from measurements of large schemas and many small ones."""
        return 2**17 + 64 * len(source.text)


class _VocabularyView:
    """A vocabulary with the interface that llguidance needs."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        num_tokens = min(tokenizer.vocab_size, vocab_size)
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_tokens)]
        self.tokens += [b""] * (vocab_size - num_tokens)
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        self.bos_token_id = tokenizer.bos_token_id
        # One is required. Without an end token, the grammar ends when nothing can follow.
        self.eos_token_ids = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size) or [vocab_size - 1]
        self.eos_token_id = self.eos_token_ids[0]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = frozenset(self.special_token_ids)
        return {token: i for i, token in enumerate(self.tokens) if token and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens that spell exactly `text`, as the tokenizer would usually split it."""
        token_ids = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        if b"".join(self.tokens[i] for i in token_ids) == text:
            return token_ids
        return self._spell(text)

    def _spell(self, text: bytes) -> list[int]:
        """Spell a text with the longest matching tokens, for vocabularies that put a space before every text."""
        token_ids: list[int] = []
        while text:
            size = next((n for n in range(min(len(text), self._longest), 0, -1) if text[:n] in self._ids), None)
            if size is None:
                return token_ids
            token_ids.append(self._ids[text[:size]])
            text = text[size:]
        return token_ids


def _reason(matcher: LLMatcher) -> str:
    """Return the first lines of llguidance's message, without its backtraces."""
    error = str(matcher.get_error()).partition("\n<")[0].strip()
    return "it is too large or too complex" if error.startswith("panic") else error


# --- sources ---


class GrammarSource(NamedTuple):
    """A grammar in llguidance's form.

    field: its field in `StructuredOutputsParams`.
    """

    field: str
    text: str


def make_source(params: StructuredOutputsParams, *, closed_objects: bool = False) -> GrammarSource:
    """Return the source of a grammar. Raises UsageError for errors that can be found without compiling."""
    if params.json_object:
        return GrammarSource("json_object", _json_grammar({"type": "object"}))
    if params.json is not None:
        schema = _parse_schema(str(params.json))
        return GrammarSource("json", _json_grammar(close_objects(schema) if closed_objects else schema))
    if params.regex is not None:
        _check_regex(params.regex)
        return GrammarSource("regex", LLMatcher.grammar_from_regex(params.regex))
    if params.grammar is not None:
        return GrammarSource("grammar", LLMatcher.grammar_from_lark(_lark(params.grammar)))
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice or ())
    return GrammarSource("choice", LLMatcher.grammar_from_lark(f"start: {choices}"))


def _refusal(field: str, problem: str) -> UsageError:
    code = "invalid_json_schema" if field == "json" else "invalid_grammar"
    shown = problem if len(problem) <= _MAX_CHARS_SHOWN else problem[:_MAX_CHARS_SHOWN] + "..."
    return UsageError(f"structured_outputs.{field} {shown}", param=f"structured_outputs.{field}", code=code)


def _lark(grammar: str) -> str:
    """Return a grammar in Lark or GBNF, converted to Lark that llguidance enforces."""
    try:
        return gbnf_to_lark(grammar) if is_gbnf(grammar) else enforceable_lark(grammar)
    except GbnfError as error:
        raise _refusal("grammar", f"is not a grammar in GBNF: {error}") from None
    except UnenforceableError as error:
        raise _refusal("grammar", f"has a %json schema that cannot be enforced: {error}") from None


def _json_grammar(schema: dict[str, Any]) -> str:
    try:
        source = json.dumps(enforceable_schema(schema))
    except UnenforceableError as error:
        raise _refusal("json", f"cannot be enforced: {error}") from None
    text: str = LLMatcher.grammar_from_json_schema(source, overrides=_JSON_OPTIONS)
    return text


def _parse_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal("json", f"is not valid JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refusal("json", f"must be an object or true, not {schema!r:.80}")
    if "x-guidance" in schema:
        raise _refusal("json", "has the keyword /x-guidance, which is not supported")
    _check_sizes(schema)
    return schema


def _check_sizes(schema: dict[str, Any]) -> None:
    """Reject schemas that would compile but can never be satisfied, or that take too long to compile."""
    level: list[Any] = [schema]
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        level = [child for value in level for child in _children(value)]
    raise _refusal("json", f"is nested deeper than {_MAX_DEPTH} levels")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return ()
    for key in _LENGTHS:
        length = value.get(key)
        if isinstance(length, (int, float)) and length > _MAX_REPEAT:
            raise _refusal("json", f"has {key} {length:g}; at most {_MAX_REPEAT} can be enforced")
    for key in ("properties", "required"):
        names = value.get(key)
        if isinstance(names, (dict, list)) and len(names) > _MAX_NAMES:
            raise _refusal("json", f"has {len(names)} {key} in one object; at most {_MAX_NAMES} can be enforced")
    return [child for key, child in value.items() if key not in _DATA_KEYWORDS]


def _check_regex(regex: str) -> None:
    for found in _REPETITION.finditer(regex):
        if any(len(number) > 9 or int(number) > _MAX_REPEAT for number in found.groups() if number):
            raise _refusal("regex", f"repeats {found[0]:.40} times; at most {_MAX_REPEAT} are allowed")
