"""Structured outputs: what is enforced, what is refused, and that nobody else notices."""

from __future__ import annotations

import gc
import json
import re
import time
import weakref
from typing import Any

import numpy as np
import pytest

from octavo.engine.engine import Engine, RequestFailure
from octavo.engine.limits import EngineLimits
from octavo.engine.texts.constrained import GrammarCache, GrammarCompiler, GrammarSource, make_source
from octavo.errors import UsageError
from octavo.outputs import CompletionOutput, OutputDelta
from octavo.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.support import fake_executor
from tests.support.answers import Answers
from tests.support.byte_tokenizer import NUM_TOKENS, ByteTokenizer
from tests.support.drafting import DraftingSampler
from tests.support.fake_executor import FakeExecutor, create_request, fake_logits
from tests.support.integrity import check_integrity

NUM_COLUMNS = 263
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


TOKENIZER = ByteTokenizer()


@pytest.fixture(autouse=True)
def _wide_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(token_ids: list[int]) -> Any:
        values = fake_logits(token_ids, NUM_COLUMNS)
        if fake_executor.real_model is None:
            values[NUM_TOKENS:] += 50  # the padding of the logits, which nobody may choose
        return values

    monkeypatch.setattr(fake_executor, "fake_logits", logits)


def make_engine(num_blocks: int = 256, max_num_seqs: int = 8) -> Engine:
    executor = FakeExecutor()
    executor.allocate_cache(num_blocks, 4)
    return Engine(
        executor, TOKENIZER, EngineLimits(256, max_num_seqs, 64, max_num_seqs + 4, 4, num_blocks, NUM_COLUMNS)
    )


def run_all(engine: Engine) -> Answers:
    seen = Answers()
    while engine.has_work:
        seen.take(engine.step())
        check_integrity(engine.scheduler)
    return seen


def answers(engine: Engine, constraint: dict[str, Any], **params: Any) -> list[CompletionOutput]:
    arguments: dict[str, Any] = {"max_tokens": 200, "seed": 5, **params}
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), **arguments)
    engine.add_request(create_request(engine, "r", [5, 6], sampling))
    output = run_all(engine)["r"]
    assert isinstance(output, OutputDelta), output
    return output.outputs


def answer(constraint: dict[str, Any], **params: Any) -> CompletionOutput:
    return answers(make_engine(), constraint, **params)[0]


def test_a_regex_is_the_whole_answer_and_its_end_needs_no_token() -> None:
    for seed in range(5):
        choice = answer({"regex": r"[a-c]{3}-[0-9]{2}é"}, seed=seed)
        assert re.fullmatch(r"[a-c]{3}-[0-9]{2}é", choice.text), choice.text
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
        assert len(choice.token_ids) == 8


def test_braces_of_code_points_and_properties_are_no_repetitions() -> None:
    """U+20000 is a character of 4 bytes: 20,000 would be too many repetitions."""
    pattern = r"\x{20000}\u{20000}\U{00020000}[\x{20000}-\x{20001}]\p{Greek}{2}"
    text = answer({"regex": pattern}).text
    assert text[:3] == "\U00020000" * 3
    assert text[3] in "\U00020000\U00020001"
    assert len(text) == 6


@pytest.mark.parametrize("texts", [["yes", "no"], ['a"b', "back\\slash", "new\nline", "é€😀", "a/b", "tab\t"]])
def test_one_of_the_choices_is_spelled_exactly(texts: list[str]) -> None:
    engine = make_engine()
    seen = {answers(engine, {"choice": texts}, seed=seed, temperature=2.0)[0].text for seed in range(40)}
    assert seen <= set(texts)
    assert len(seen) > 1


def test_json_follows_its_schema_with_little_white_space() -> None:
    engine = make_engine()
    for seed in range(5):
        for bias in (None, {2 + ord(" "): 20.0, 2 + ord("\n"): 18.0}):
            choice = answers(engine, {"json": SCHEMA}, seed=seed, logit_bias=bias, min_tokens=3)[0]
            value = json.loads(choice.text)
            assert set(value) == {"name", "age"}
            assert isinstance(value["age"], int)
            assert 0 <= value["age"] <= 99
            if bias is not None:
                assert re.search(r"\s{8}", choice.text)
            assert not re.search(r"\s{9}", re.sub(r'"(\\.|[^"\\])*"', '""', choice.text))


@pytest.mark.parametrize("wrong", [2 + ord("a"), 2 + ord("}"), 1])
@pytest.mark.parametrize(
    "constraint", [{"json": SCHEMA}, {"regex": r"[a-f]{3,9}-[0-9]{2}"}, {"choice": ["abc", "abd"]}]
)
def test_drafts_change_no_structured_answer(constraint: dict[str, Any], wrong: int) -> None:
    """Right ones, those that only the model refuses, and those that the grammar forbids; an end of text too."""
    for seed in range(4):
        for ignore_eos in (False, True):
            params = {"seed": seed, "logprobs": 2, "ignore_eos": ignore_eos}
            expected = answer(constraint, **params)
            engine = make_engine()
            sampling = SamplingParams(
                structured_outputs=StructuredOutputsParams(**constraint), **{"max_tokens": 200, **params}
            )
            for name in ("r", "other"):
                request = create_request(engine, name, [5, 6], sampling)
                drafts = [wrong if (i + seed) % 4 == 3 else token for i, token in enumerate(expected.token_ids)]
                request.groups[0].consumers = (DraftingSampler([*drafts, *[wrong] * 5], seed, least=1),)
                engine.add_request(request)
            for output in run_all(engine).values():
                assert isinstance(output, OutputDelta), output
                assert output.outputs == [expected]
            executor = engine.executor
            assert isinstance(executor, FakeExecutor)
            assert executor.num_steps < 0.8 * len(expected.token_ids) + 2


def test_masks_follow_the_drafts_and_leave_the_state() -> None:
    state = GrammarCompiler(TOKENIZER, NUM_COLUMNS).compile(StructuredOutputsParams(json=SCHEMA)).copy()
    drafts = TOKENIZER.encode('{"name":"ab"x', add_special_tokens=False)
    assert state.num_allowed(drafts) == 12
    assert state.num_allowed([*drafts[:3], 1]) == 3
    for count in (0, 5, 12):
        masks = np.full((count + 2, -(-NUM_COLUMNS // 32)), 0xFFFFFFFF, np.uint32)
        rows = state.rows(1, may_end=True)
        rows.drafts.extend(drafts[:count])
        state.filler.fill([rows], masks)
        assert (masks[0] == 0xFFFFFFFF).all()
        for i in range(count + 1):
            later = state.copy()
            for token_id in drafts[:i]:
                later.accept(token_id)
            expected = np.full((1, masks.shape[1]), 0xFFFFFFFF, np.uint32)
            later.filler.fill([later.rows(0, may_end=True)], expected)
            np.testing.assert_array_equal(masks[i + 1], expected[0])


def test_json_object_is_an_object() -> None:
    closing = {2 + ord("}"): 6.0, 2 + ord('"'): 6.0, 2 + ord("]"): 6.0}
    choices = [answer({"json_object": True}, seed=seed, logit_bias=closing) for seed in range(8)]
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(choice.text), dict) for choice in ended)
    assert all(choice.text.startswith("{") for choice in choices)


def test_a_lark_grammar_with_recursion() -> None:
    text = answer({"grammar": 'start: list\nlist: "(" list ")" | "x"'}, logit_bias={2 + ord("x"): 4.0}).text
    assert re.fullmatch(r"\(*x\)*", text)
    assert text.count("(") == text.count(")")


def test_the_end_of_text_may_come_where_the_grammar_is_complete() -> None:
    choice = answer({"regex": "[a-z]+"}, logit_bias={1: 100.0})
    assert (len(choice.token_ids), choice.token_ids[-1], len(choice.text), choice.finish_reason) == (2, 1, 1, "stop")
    late = answer({"regex": "[a-z]+"}, logit_bias={1: 100.0}, min_tokens=6)
    assert (len(late.token_ids), len(late.text)) == (7, 6)
    never = answer({"regex": "[a-z]+"}, logit_bias={1: 100.0}, ignore_eos=True, max_tokens=9)
    assert (len(never.text), never.finish_reason) == (9, "length")
    complete = answer({"regex": "[a-z]{4}"}, ignore_eos=True, min_tokens=9)
    assert (len(complete.text), complete.finish_reason) == (4, "stop")


def test_limits_and_stop_strings_end_an_answer_before_its_grammar() -> None:
    assert answer({"regex": "a{50}"}, max_tokens=7).finish_reason == "length"
    choice = answer({"regex": "a{50}b"}, stop="aaa")
    assert (choice.text, choice.stop_reason) == ("", "aaa")
    token = answer({"regex": "ab*"}, stop_token_ids=[2 + ord("b")], logit_bias={1: -100.0})
    assert (token.text, token.stop_reason) == ("a", 2 + ord("b"))


def test_allowed_tokens_and_grammar_both_hold() -> None:
    allowed = [1, *(2 + byte for byte in b"abc")]
    assert re.fullmatch("[bc]{12}", answer({"regex": "[b-z]{12}"}, allowed_token_ids=allowed).text)


def test_deltas_join_to_the_answer() -> None:
    engine = make_engine()
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=SCHEMA),
        max_tokens=200,
        seed=5,
        output_kind=RequestOutputKind.DELTA,
    )
    engine.add_request(create_request(engine, "r", [5, 6], params))
    text = ""
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, OutputDelta)
            text += "".join(part.text for part in output.outputs)
    assert text == answer({"json": SCHEMA}).text


def test_an_answer_is_the_same_alone_in_a_crowd_and_after_preemptions() -> None:
    alone = [choice.token_ids for choice in answers(make_engine(), {"json": SCHEMA}, n=3)]
    assert len({tuple(tokens) for tokens in alone}) == 3
    crowd = make_engine(num_blocks=24, max_num_seqs=6)
    for i in range(4):
        params = SamplingParams(max_tokens=30, ignore_eos=True, allowed_token_ids=range(2, NUM_TOKENS))
        crowd.add_request(create_request(crowd, f"other{i}", [9, i + 2], params))
    crowded = answers(crowd, {"json": SCHEMA}, n=3, max_tokens=60)
    assert [choice.token_ids for choice in crowded] == [tokens[:60] for tokens in alone]
    assert crowd.metrics.num_preemptions_total > 0


def test_unconstrained_steps_have_no_mask_and_others_keep_their_answers() -> None:
    engine = make_engine()
    free = SamplingParams(max_tokens=12, seed=3, allowed_token_ids=None)
    engine.add_request(create_request(engine, "free", [5], free))
    engine.step()
    schedule = engine.scheduler.schedule()
    batch = engine._batch_builder.build(schedule)
    assert batch.sampling is not None
    assert batch.sampling.allowed_mask is None


def test_a_grammar_that_gets_stuck_ends_only_its_own_request() -> None:
    engine = make_engine()
    dead_end = StructuredOutputsParams(grammar='start: "a" forever | "b" never\nforever: "x"\nnever: never "y"')
    b_first = {2 + ord("b"): 100.0}
    stuck = SamplingParams(structured_outputs=dead_end, logit_bias=b_first)
    contradiction = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), allowed_token_ids=[2])
    good = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]{9}"), seed=1)
    for name, params in (("stuck", stuck), ("contradiction", contradiction), ("good", good)):
        engine.add_request(create_request(engine, name, [5, 6], params))
    seen = run_all(engine)
    for name in ("stuck", "contradiction"):
        failure = seen[name]
        if isinstance(failure, RequestFailure):
            assert isinstance(failure.error, UsageError), failure
        else:  # llguidance knew that `never` never ends, and left it out
            assert name == "stuck"
            assert failure.outputs[0].text == "ax"
    output = seen["good"]
    assert isinstance(output, OutputDelta)
    assert re.fullmatch("[a-z]{9}", output.outputs[0].text)
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 0


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSED: list[tuple[str, str, Any]] = [
    ("banana", "json", {"type": "banana"}),
    ("pattern", "json", {"type": "string", "pattern": "("}),
    ("no target", "json", {"$ref": "#/$defs/x"}),
    ("loop", "json", {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}),
    ("remote", "json", {"$ref": "http://127.0.0.1:1/x"}),
    ("deep", "json", nested(90)),
    ("deeper", "json", '{"items":' * 5000 + "{}" + "}" * 5000),
    ("minLength", "json", {"type": "string", "minLength": 10**9}),
    ("minItems", "json", {"type": "array", "minItems": 10**9}),
    ("unsatisfiable", "json", {"type": "integer", "minimum": 5, "maximum": 3}),
    ("types", "json", {"allOf": [{"type": "string"}, {"type": "integer"}]}),
    ("false", "json", "false"),
    ("list", "json", "[1]"),
    ("cut", "json", "{"),
    ("unsupported", "json", {"not": {"type": "string"}}),
    ("format", "json", {"type": "string", "format": "banana"}),
    ("options", "json", {"type": "string", "x-guidance": {"lenient": True}}),
    ("required", "json", {"type": "object", "required": [f"p{i}" for i in range(30_000)]}),
    ("repeat", "regex", "a{1,100000}"),
    ("repeat behind a code point", "regex", r"\x{20000}{20000}"),
    ("repeat behind a backslash", "regex", r"\\{20000}"),
    ("look-behind", "regex", "(?<=a)b"),
    ("backreference", "regex", r"(a)\1"),
    ("open", "regex", "("),
    ("nested regex", "regex", "(" * 15_000 + "a" + ")" * 15_000),
    ("empty set", "regex", r"[^\s\S]"),
    ("nested grammar", "grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    ("no end", "grammar", 'start: start "a"'),
    ("undefined", "grammar", "start: foo"),
    ("no start", "grammar", 'foo: "a"'),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, NUM_COLUMNS)


@pytest.mark.parametrize(("field", "source"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_enforced_is_refused_at_once(compiler: GrammarCompiler, field: str, source: object) -> None:
    start = time.process_time()
    with pytest.raises(UsageError) as caught:
        compiler.compile(StructuredOutputsParams(**{field: source}))  # type: ignore[arg-type]
    code = "invalid_json_schema" if field == "json" else "invalid_grammar"
    assert (caught.value.param, caught.value.code) == (f"structured_outputs.{field}", code)
    assert len(str(caught.value)) < 400
    assert time.process_time() - start < 4


def chain(length: int, rule: str, last: str) -> str:
    return "\n".join(["start: a0", *(rule.format(i, i + 1) for i in range(length)), last.format(length)])


tool = {
    "type": "object",
    "properties": {f"a{i}": {"type": "string", "description": "x" * 40} for i in range(20)},
    "required": ["a0", "a1"],
}
LARGE: list[tuple[str, str, Any]] = [
    ("enum", "json", {"enum": [f"value-{i}" for i in range(10_000)]}),
    ("maxItems", "json", {"type": "array", "items": {"type": "string"}, "maxItems": 10**9}),
    ("tools", "json", {"anyOf": [{"properties": {"name": {"const": f"t{i}"}, "arguments": tool}} for i in range(60)]}),
    ("true", "json", "true"),
    ("powers", "regex", "(a+)+b"),
    ("stars", "regex", "(.*)*x"),
    ("left recursion", "grammar", 'start: start "a" | "a"'),
    # These two overflow a stack of ordinary size.
    ("rules", "grammar", chain(12_000, "a{}: a{}", 'a{}: "x"')),
    ("references", "json", {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)} | {"a5000": {}}}),
]


@pytest.mark.parametrize(("field", "source"), [case[1:] for case in LARGE], ids=[case[0] for case in LARGE])
def test_large_and_odd_grammars_are_accepted(compiler: GrammarCompiler, field: str, source: Any) -> None:
    if isinstance(source, dict) and "$defs" in source:
        source = {**source, "$ref": "#/$defs/a0"}
    start = time.process_time()
    state = compiler.compile(StructuredOutputsParams(**{field: source})).copy()
    assert time.process_time() - start < 4
    assert not state.is_complete
    assert state.error is None


@pytest.mark.parametrize("num_properties", [500, 2000, 2048])
def test_any_of_many_optional_properties_may_follow(num_properties: int, compiler: GrammarCompiler) -> None:
    """Before, the second property was one too many for the compiler: the answer ended in the middle."""
    properties = {f"p{i}": {"type": "string"} for i in range(num_properties)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    state = compiler.compile(StructuredOutputsParams(json=schema)).copy()
    masks = np.zeros((1, -(-NUM_COLUMNS // 32)), np.uint32)
    slowest_s = 0.0
    names = [f"p{i}" for i in (0, 1, 7, num_properties // 2, num_properties - 1)]
    for token_id in TOKENIZER.encode(json.dumps(dict.fromkeys(names, "x")), add_special_tokens=False):
        masks[:] = 0xFFFFFFFF
        began_s = time.thread_time()
        state.filler.fill([state.rows(0, may_end=True)], masks)
        assert masks[0, token_id // 32] >> token_id % 32 & 1, state.error
        state.accept(token_id)
        slowest_s = max(slowest_s, time.thread_time() - began_s)
    assert state.is_complete
    assert slowest_s < 0.25  # for which all other streams wait


@pytest.mark.parametrize("end", ["finished", "aborted", "stuck"])
def test_the_state_of_a_grammar_is_free_when_its_answer_ends_and_waits_for_no_collection(end: str) -> None:
    engine = make_engine()
    regex = "[é]{3}" if end == "stuck" else "[a-z]{30}"
    forbidden = {"bad_words": ["\xc3"]} if end == "stuck" else {}
    gc.collect()
    gc.disable()
    try:
        params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex=regex), **forbidden)
        request = create_request(engine, "r", [5, 6], params)
        states = [weakref.ref(sequence.grammar) for sequence in request.sequences if sequence.grammar is not None]
        engine.add_request(request)
        del request
        engine.step()
        assert engine.has_work
        if end == "aborted":
            engine.abort("r")
        run_all(engine)
        # Arrays of the last step may be kept for the next one.
        engine.add_request(create_request(engine, "next", [5, 6], SamplingParams(max_tokens=2)))
        run_all(engine)
        assert [state() for state in states] == [None]
    finally:
        gc.enable()


def test_a_grammar_is_compiled_once() -> None:
    compiler = GrammarCompiler(TOKENIZER, NUM_COLUMNS)
    params = StructuredOutputsParams(json=SCHEMA)
    first = compiler.compile(params)
    size = compiler.cache.num_bytes
    assert size > 0
    assert compiler.compile(StructuredOutputsParams(json=json.dumps(SCHEMA))).matcher is first.matcher
    assert compiler.compile(StructuredOutputsParams(json={**SCHEMA, "title": "x"})).matcher is not first.matcher
    assert compiler.cache.num_bytes > size


def test_the_cache_keeps_the_last_used_within_its_bytes() -> None:
    cache = GrammarCache(5 * 2**17)
    sources = [GrammarSource("regex", f"a{i}") for i in range(50)]
    matcher = GrammarCompiler(TOKENIZER, NUM_COLUMNS).compile(StructuredOutputsParams(regex="a")).matcher
    for source in sources:
        cache.put(source, matcher)
        cache.get(sources[0])
    assert len(cache._matchers) == 4
    assert sources[0] in cache._matchers
    assert sources[-1] in cache._matchers
    assert cache.num_bytes == sum(GrammarCache._cost(source) for source in cache._matchers)


def test_sources_with_the_same_text_but_another_meaning_differ() -> None:
    assert make_source(StructuredOutputsParams(regex="a")) != make_source(StructuredOutputsParams(choice=["a"]))


def test_a_vocabulary_without_end_of_text_ends_with_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "eos_token_ids", frozenset())
    choice = answer({"regex": "[a-z]{4}"})
    assert (len(choice.text), choice.finish_reason) == (4, "stop")
