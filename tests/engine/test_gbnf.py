"""Grammars of llama.cpp: what they accept, against a recognizer that follows their rules character by character."""

from __future__ import annotations

import itertools
import random
import re
import time
from contextlib import suppress

import pytest

from octavo.engine.texts.constrained import GrammarCompiler, GrammarState
from octavo.engine.texts.gbnf import (
    CharSet,
    GbnfError,
    Literal,
    OneOf,
    Repetition,
    Row,
    RuleName,
    Symbol,
    is_gbnf,
    parse_gbnf,
)
from octavo.engine.texts.gbnf_to_lark import MAX_GBNF_CHARS, gbnf_to_lark
from octavo.errors import UsageError
from octavo.sampling_params import StructuredOutputsParams
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.gbnf_grammars import GRAMMARS

COMPILER = GrammarCompiler(ByteTokenizer(), 263)


def compiled(grammar: str) -> GrammarState:
    return COMPILER.compile(StructuredOutputsParams(grammar=grammar))


def accepts(state: GrammarState, text: str) -> bool:
    matcher, token_ids = state.matcher.deep_copy(), [2 + byte for byte in text.encode()]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


class Recognizer:
    """The texts of a grammar by its rules alone: for each rule and place, where it may end."""

    def __init__(self, grammar: str) -> None:
        self._rules = parse_gbnf(grammar)

    def matches(self, text: str) -> bool:
        self._text = text
        self._ends: dict[tuple[str, int], set[int]] = {}
        self._changed = True
        while self._changed:
            self._changed = False
            for name, place in [("root", 0), *self._ends]:
                found = self._from(self._rules[name], {place})
                self._changed |= not found <= self._ends.setdefault((name, place), set())
                self._ends[name, place] |= found
        return len(text) in self._ends["root", 0]

    def _from(self, symbol: Symbol, places: set[int]) -> set[int]:
        text = self._text
        if isinstance(symbol, Literal):
            word = "".join(map(chr, symbol.codes))
            return {place + len(word) for place in places if text.startswith(word, place)}
        if isinstance(symbol, CharSet):
            ranges = symbol.ranges
            return {i + 1 for i in places if i < len(text) and any(a <= ord(text[i]) <= b for a, b in ranges)}
        if isinstance(symbol, OneOf):
            return set().union(*(self._from(item, places) for item in symbol.items))
        if isinstance(symbol, Row):
            for item in symbol.items:
                places = self._from(item, places)
            return places
        if isinstance(symbol, Repetition):
            found: set[int] = places if symbol.least == 0 else set()
            for count in itertools.count(1):
                before, places = places, self._from(symbol.item, places)
                if symbol.most is not None and count > symbol.most:
                    break
                if count > symbol.least and places <= found | before and count > len(text) + 1:
                    break
                found = found | places if count >= symbol.least else found
                if not places or count > symbol.least + len(text) + 1:
                    break
            return found
        assert isinstance(symbol, RuleName)
        for place in places:
            if (symbol.name, place) not in self._ends:
                self._ends[symbol.name, place] = set()
                self._changed = True
        return set().union(*(self._ends[symbol.name, place] for place in places))


def random_grammar(rng: random.Random) -> str:
    names = ["root", "start", "a-b", "a_b", "x"][: rng.randint(2, 5)]

    def symbol(depth: int) -> str:
        kind = rng.randrange(7 if depth else 5)
        if kind < 2:
            return (
                '"'
                + "".join(rng.choices(["a", "b", "\\x20", "\\u0061", "\\U00000062", "ab"], k=rng.randint(1, 2)))
                + '"'
            )
        if kind == 2:
            return rng.choice(["[ab]", "[^a]", "[a-b ]", "[\\u0061-\\U00000062]", ".", "[^b\\x20]"])
        if kind < 5:
            return rng.choice(names)
        return f"({alternatives(depth - 1)})"

    def sequence(depth: int) -> str:
        signs = ["", "", "", "", "*", "+", "?", "{2}", "{0}", "{1,}", "{0,2}", "{ 1 , 2 }", "{2}?"]
        return " ".join(symbol(depth) + rng.choice(signs) for _ in range(rng.randint(1, 3)))

    def alternatives(depth: int) -> str:
        found = " | ".join(sequence(depth) if rng.random() < 0.95 else '""' for _ in range(rng.randint(1, 2)))
        return found if rng.random() < 0.95 else f"| {found}"

    return "\n".join(f"{name} ::= {alternatives(2)}" for name in names)


TEXTS = ["".join(chars) for size in range(5) for chars in itertools.product("ab ", repeat=size)]


@pytest.mark.parametrize("seed", range(2))
def test_a_text_is_accepted_if_and_only_if_the_rules_derive_it(seed: int) -> None:
    rng = random.Random(seed)
    num_compiled = num_accepted = 0
    for _ in range(30):
        grammar = random_grammar(rng)
        try:
            state = compiled(grammar)
        except UsageError as error:
            assert re.search("no text|cannot be enforced", str(error)), (grammar, error)  # noqa: PT017
            continue
        recognizer = Recognizer(grammar)
        num_compiled += 1
        for text in rng.sample(TEXTS, 40):
            accepted = accepts(state, text)
            assert accepted == recognizer.matches(text), (grammar, text)
            num_accepted += accepted
    assert num_compiled > 15
    assert num_accepted > 50


@pytest.mark.parametrize(("grammar", "right", "wrong"), GRAMMARS.values(), ids=GRAMMARS.keys())
def test_grammars_as_llama_cpp_publishes_them(grammar: str, right: list[str], wrong: list[str]) -> None:
    state, recognizer = compiled(grammar), Recognizer(grammar)
    for text in right:
        assert accepts(state, text), text
        assert recognizer.matches(text), text
    for text in wrong:
        assert not accepts(state, text), text
        assert not recognizer.matches(text), text


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (r'root ::= "\u00e9\U0001F600\x41\t\r\n\\\"\[\]"', 'é😀A\t\r\n\\"[]', "e"),
        (r"root ::= [\u0430-\u044f\U0001F600-\U0001F64F\]\\-]+", "яа😁]\\-", "a"),
        (r"root ::= [^\u0430-\u044f\n]+", "a é", "я"),
        ('root ::= ("a"{2} | "b"){3}{2}', "aabbbaab", "aab"),
        ('root ::= (("a"{1,2} "-"){2} ";")+', "a-aa-;aa-a-;", "a-;"),
        ('root ::= "a"{0} "b"', "b", "ab"),
        ('root ::= "ab"* "a"', "ababa", "aba b"),
        ('root ::= start a-b a_b\nstart ::= "1"\na-b ::= "2"\na_b ::= "3"', "123", "133"),
        ('root ::= end Rule rule\nend ::= "1"\nRule ::= "2"\nrule ::= "3"', "123", "122"),
        ("root ::= .{2}", "\n😀", "a"),
        ('# one\nroot ::= # two\n  "#" ( # three\n\n "a" | # four\n "b" )\n\n# five', "#b", "#"),
        ('root ::= "a" |\n  "b"\r\nroot ::= "c"', "c", "a"),
        ('root ::= [a-z]* "x"', "abxx", "ab"),
        ('root ::= "a" "bc" | "ab" "d"', "abc", "ab"),
        ('root ::= root "a" | "b"', "baa", "a"),
        ('root ::= x "a"\nx ::= | "(" x ")" | "a"*', "(())a", "(()a"),
        ('root ::= "" | ( | "a" )', "a", "b"),
    ],
)
def test_what_the_form_allows(grammar: str, right: str, wrong: str) -> None:
    state = compiled(grammar)
    assert accepts(state, right)
    assert not accepts(state, wrong)


def test_control_tokens() -> None:
    lark = gbnf_to_lark("root ::= <think> !<[7]>* <[8]> text\ntext ::= [^<]+")
    assert "<think> (<[^7]>)* <[8]>" in lark


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("root ::= nowhere", "line 1: the rule nowhere is not defined at 'nowhere'"),
        ('a ::= "x"', "there is no rule root"),
        ('root ::= "a', "line 1: unexpected end"),
        ('root ::= "\\q"', "unknown escape"),
        ('root ::= "\\u12"', "unknown escape"),
        ("root ::= [b-a]", "the ends of a range before this are out of order"),
        ("root ::= []", "the class before this is empty"),
        ("root ::= (a", "expecting )"),
        ('root ::= "a"{,2}', "expected {m}, {m,} or {m,n}"),
        ('root ::= "a"{3,2}', "{3,2}: the numbers are out of order"),
        ("root ::= *", "expected something to repeat"),
        ('\nroot = "a"\nx ::= "a"', "line 2: expecting ::="),
        ('root ::= "a" )', "expected the end of the line"),
        ('root ::= "\\U00110000"', "U+110000 before this is not a character"),
        ('root ::= "\\uD800"', "U+D800 is half of a character"),
        ("root ::= !<think>", "write a negated token by its id"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "groups are nested deeper than 100"),
        ('root ::= "' + "a" * MAX_GBNF_CHARS + '"', "at most 65,536 are allowed"),
    ],
)
def test_wrong_grammars_are_refused_with_their_line(grammar: str, problem: str) -> None:
    with pytest.raises(GbnfError, match=re.escape(problem)):
        gbnf_to_lark(grammar)
    with pytest.raises(UsageError, match=r"structured_outputs\.grammar is not a grammar in GBNF: ") as caught:
        compiled(grammar)
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    "grammar",
    [
        "\n".join(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(2000)) + '\nr2000 ::= "a"\nroot ::= r0',
        "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"\nroot ::= r0 "b"',
        "\n".join(f'r{i} ::= "x" r{(i * 7) % 900} | "y" r{(i * 11) % 900} | "z"' for i in range(900))
        + "\nroot ::= r0+",
        "root ::= x+\nx ::= " + " | ".join(f'"{"a" * i}"' for i in range(1, 200)),
        "root ::= " + '"a"? ' * 4000,
    ],
)
def test_large_grammars_end_soon(grammar: str) -> None:
    started = time.process_time()
    with suppress(GbnfError):
        gbnf_to_lark(grammar)
    assert time.process_time() - started < 3.0


def test_gbnf_is_told_from_lark() -> None:
    assert is_gbnf('# x\nstart ::= "a"')
    assert is_gbnf('root::="a"')
    assert not is_gbnf('start: "root ::= a"')
    assert not is_gbnf("start: x\nx: /a ::= b/")
