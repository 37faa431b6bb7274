"""The engine: when sequences end, what their users see, and that nobody's answer depends on the others."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest

from octavo.engine.engine import Engine, RequestFailure
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import derive_seed
from octavo.errors import NumericalError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.outputs import OutputDelta
from octavo.prompt import Prompt
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from tests.support import fake_executor
from tests.support.answers import Answers, answers_of, whole
from tests.support.fake_executor import (
    EOS_ID,
    VOCAB_SIZE,
    FakeExecutor,
    FakeTokenizer,
    create_request,
    fake_engine,
    fake_logits,
)
from tests.support.integrity import check_integrity

TOKENIZER = FakeTokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(
    engine: Engine, prompt: list[int], params: SamplingParams, name: str = "r", **options: object
) -> list[OutputDelta]:
    engine.add_request(create_request(engine, name, prompt, params, **options))
    outputs = []
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, OutputDelta)
            outputs.append(output)
    return outputs


def last(prompt: list[int], engine: Engine | None = None, **params: object) -> OutputDelta:
    return whole(run(engine or fake_engine(), prompt, SamplingParams(**params)))  # type: ignore[arg-type]


def spell(text: str, engine: Engine | None = None, **params: object) -> OutputDelta:
    """An answer that is made to say `text`, by letting the model choose nothing else."""
    # The fake tokenizer has one token a character, so one allowed token spells only a repeated character.
    return last([5, 6], engine, allowed_token_ids=sorted(set(ids(text))), **params)


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def test_greedy_tokens_are_those_of_the_model() -> None:
    output = last([7, 8, 9], temperature=0, max_tokens=10, ignore_eos=True)
    choice = output.outputs[0]
    assert choice.token_ids == greedy([7, 8, 9], 10)
    assert (choice.finish_reason, choice.stop_reason, output.finished) == ("length", None, True)
    assert choice.cumulative_logprob is None
    assert choice.logprobs is None


def test_a_followed_request_tells_each_part_of_its_prompt() -> None:
    """Beside one that is not followed, whose outputs stay as they are."""
    engine, params = fake_engine(), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = [*range(5, 45)]  # steps have 16 tokens
    run(engine, prompt[:8], params, "first")  # two blocks of the prompt are cached then
    followed = GenerationRequest(prompt=Prompt(prompt), params=params, is_followed=True)
    engine.add_request(engine.create_request("followed", followed))
    engine.add_request(create_request(engine, "plain", [60, 61], params))
    outputs = [output for _ in range(40) if engine.has_work for output in engine.step()]
    mine = [output for output in outputs if isinstance(output, OutputDelta) and output.request_id == "followed"]
    parts = [output.metrics for output in mine if not output.outputs]
    told = [(part.num_processed_tokens, part.num_cached_tokens) for part in parts if part is not None]
    assert told == [(8, 8), (24, 8)]  # the first token tells the end
    assert {part.num_prompt_tokens for part in parts if part} == {40}
    counts = [output.metrics.num_generated_tokens for output in mine if output.outputs and output.metrics]
    assert counts == [1, 2, 3, 4]
    plain = [output for output in outputs if isinstance(output, OutputDelta) and output.request_id == "plain"]
    assert all(output.outputs for output in plain)
    assert [output.metrics is not None for output in plain] == [True, False, False, True]
    assert (
        whole(mine).outputs[0].token_ids
        == last(prompt, temperature=0, max_tokens=4, ignore_eos=True).outputs[0].token_ids
    )


def test_the_end_of_text_ends_the_answer_and_is_not_part_of_its_text() -> None:
    output = last([5], logit_bias={EOS_ID: 100.0}, max_tokens=5)
    choice = output.outputs[0]
    assert (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason) == ([EOS_ID], "", "stop", None)
    shown = last([5], logit_bias={EOS_ID: 100.0}, include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown.outputs[0].text == "<eos>"


def test_ignore_eos_goes_on_and_min_tokens_keeps_it_away() -> None:
    assert last([5], logit_bias={EOS_ID: 100.0}, ignore_eos=True, max_tokens=4).outputs[0].token_ids == [EOS_ID] * 4
    choice = last([5], logit_bias={EOS_ID: 100.0}, min_tokens=3, max_tokens=9).outputs[0]
    assert EOS_ID not in choice.token_ids[:3]
    assert choice.token_ids[3:] == [EOS_ID]


def test_stop_token_ids_end_the_answer_and_are_named() -> None:
    choice = spell("a", stop_token_ids=ids("a"), max_tokens=9).outputs[0]
    assert (choice.token_ids, choice.text, choice.finish_reason) == (ids("a"), "", "stop")
    assert choice.stop_reason == ids("a")[0]
    assert spell("a", stop_token_ids=ids("a"), include_stop_str_in_output=True).outputs[0].text == "a"


def test_min_tokens_keeps_stop_tokens_away_too() -> None:
    a, b = ids("ab")
    choice = spell("ab", logit_bias={a: 100.0}, stop_token_ids=[a], min_tokens=2, max_tokens=9).outputs[0]
    assert (choice.token_ids, choice.text, choice.stop_reason) == ([b, b, a], "bb", a)


def test_stop_strings_end_the_text_before_them() -> None:
    choice = spell("a", stop="aaa", max_tokens=9).outputs[0]
    assert (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason) == (ids("aaa"), "", "stop", "aaa")
    assert spell("a", stop=["aaa"], include_stop_str_in_output=True).outputs[0].text == "aaa"
    late = spell("a", stop="a", min_tokens=3, max_tokens=9).outputs[0]
    assert (late.text, late.stop_reason) == ("aaa", "a")


def test_a_stream_of_deltas_joins_to_the_text_and_holds_stop_strings_back() -> None:
    for stop in ((), ("aaaab",)):
        params = SamplingParams(
            allowed_token_ids=ids("ab"), seed=3, max_tokens=20, stop=stop, output_kind=RequestOutputKind.DELTA
        )
        outputs = run(fake_engine(), [5, 6], params)
        text = "".join(part.text for output in outputs for part in output.outputs)
        tokens = [token for output in outputs for part in output.outputs for token in part.token_ids]
        assert TOKENIZER.decode(tokens).startswith(text)
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason is not None
        assert all(part.finish_reason is None for output in outputs[:-1] for part in output.outputs)
        assert text == (TOKENIZER.decode(tokens).split("aaaab")[0] if stop else TOKENIZER.decode(tokens))


def test_half_a_character_waits_for_its_other_half() -> None:
    params = SamplingParams(allowed_token_ids=[2], max_tokens=3, output_kind=RequestOutputKind.DELTA)
    texts = [output.outputs[0].text for output in run(fake_engine(), [5], params)]
    assert texts == ["", "\ufffd", "\ufffd\ufffd"]


def test_outputs_hold_what_is_new_and_final_only_comes_once() -> None:
    outputs = run(fake_engine(), [5], SamplingParams(max_tokens=4, ignore_eos=True, seed=1))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 1, 1]
    final = SamplingParams(max_tokens=4, ignore_eos=True, seed=1, output_kind=RequestOutputKind.FINAL_ONLY)
    only = run(fake_engine(), [5], final)
    assert [output.outputs for output in only] == [whole(outputs).outputs]


def test_the_context_ends_the_answer() -> None:
    output = last([5] * 60, max_tokens=None, ignore_eos=True)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")


def test_without_detokenizing_there_is_no_text() -> None:
    choice = last([5], detokenize=False, ignore_eos=True, max_tokens=3).outputs[0]
    assert (choice.text, len(choice.token_ids)) == ("", 3)


def test_bad_words_are_never_completed() -> None:
    first = greedy([7, 8], 6)
    word = TOKENIZER.decode(first[1:3])
    tokens = last([7, 8], temperature=0, max_tokens=6, ignore_eos=True, bad_words=[word]).outputs[0].token_ids
    assert tokens[:2] == first[:2]
    assert tokens[2] != first[2]


def test_logprobs_are_those_of_the_model_with_the_chosen_token_first() -> None:
    choice = last([7, 8], max_tokens=3, logprobs=2, seed=5, temperature=2.0, ignore_eos=True).outputs[0]
    assert choice.logprobs is not None
    logits = fake_logits([7, 8]).astype(float)
    expected = logits - math.log(sum(math.exp(x) for x in logits))
    chosen = choice.token_ids[0]
    entry = choice.logprobs[0]
    assert next(iter(entry)) == chosen
    assert entry[chosen].logprob == pytest.approx(expected[chosen], abs=1e-4)
    best = sorted(range(VOCAB_SIZE), key=lambda i: -expected[i])
    assert set(entry) == {chosen, *best[:2]}
    assert [entry[i].rank for i in best[:2]] == [1, 2]
    assert entry[best[0]].decoded_token == TOKENIZER.token_bytes(best[0]).decode("utf-8", "replace")
    assert choice.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(choice.logprobs, choice.token_ids, strict=True))
    )


def test_zero_logprobs_report_only_the_chosen_token() -> None:
    choice = last([7], max_tokens=2, logprobs=0, ignore_eos=True).outputs[0]
    assert choice.logprobs is not None
    assert [list(entry) for entry in choice.logprobs] == [[token] for token in choice.token_ids]


@pytest.mark.parametrize("budget", [3, 5, 64])
def test_prompt_logprobs_are_the_same_for_every_chunking(budget: int) -> None:
    prompt = [7, 8, 9, 10, 11, 12, 13]
    engine = fake_engine(max_num_batched_tokens=budget, max_num_seqs=3, max_num_outputs=4)
    for _ in range(2):  # the second time the prompt is in the prefix cache, which has no logits
        output = last(prompt, engine, prompt_logprobs=1, max_tokens=1)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for i, entry in enumerate(output.prompt_logprobs[1:], 1):
            assert entry is not None
            logits = fake_logits(prompt[:i]).astype(float)
            expected = logits[prompt[i]] - math.log(sum(math.exp(x) for x in logits))
            assert entry[prompt[i]].logprob == pytest.approx(expected, abs=1e-4)
    assert output.metrics.num_cached_tokens == 0


@pytest.mark.parametrize("start", [0, 1, 2, 5, 9, 10, 99])
def test_prompt_logprobs_from_a_position_on_leave_the_rest_to_the_prefix_cache(start: int) -> None:
    prompt, engine = list(range(7, 17)), fake_engine(max_num_seqs=3)
    params = SamplingParams(prompt_logprobs=1, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
    whole = run(engine, prompt, params)[-1].prompt_logprobs
    output = run(engine, prompt, params, prompt_logprobs_start=start)[-1]
    assert output.prompt_logprobs == [None] * min(start, 10) + whole[start:]
    assert output.metrics.num_cached_tokens == (max(min(start - 1, 9), 0) // 4 * 4)


def test_a_cached_prompt_is_counted_and_gives_the_same_answer() -> None:
    engine = fake_engine()
    prompt = list(range(10, 23))
    first = last(prompt, engine, temperature=0, max_tokens=4, ignore_eos=True)
    second = last(prompt, engine, temperature=0, max_tokens=4, ignore_eos=True)
    assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 12)
    assert first.outputs == second.outputs


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_in_every_choice_order() -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    alone = run(fake_engine(), [5, 6, 7], params)[-1].outputs
    assert len({tuple(choice.token_ids) for choice in alone}) == 3
    crowd = fake_engine(num_blocks=40, max_num_seqs=6)
    for i in range(6):
        crowd.add_request(create_request(crowd, f"other{i}", [9, i + 2], SamplingParams(n=2, max_tokens=9)))
    outputs = run(crowd, [5, 6, 7], params)
    assert next(output for output in outputs if output.request_id == "r").outputs == alone
    single = SamplingParams(seed=11, max_tokens=8, ignore_eos=True)
    assert whole(run(fake_engine(), [5, 6, 7], single)).outputs[0].token_ids == alone[0].token_ids


def test_without_a_seed_answers_differ() -> None:
    answers = {tuple(last([5], max_tokens=12, ignore_eos=True).outputs[0].token_ids) for _ in range(4)}
    assert len(answers) == 4


def test_seeds_of_choices_are_stable() -> None:
    assert derive_seed(7, 0) == 7
    assert derive_seed(-1, 0) == 2**64 - 1
    assert len({derive_seed(7, i) for i in range(128)} | {derive_seed(8, i) for i in range(128)}) == 256


def test_requests_share_cached_blocks_only_under_the_same_salt() -> None:
    engine, prompt = fake_engine(), list(range(10, 23))
    cached = []
    for i, salt in enumerate(("", "a", "a", "/\0é", "", "/\0é", "b")):
        engine.add_request(
            create_request(engine, str(i), prompt, SamplingParams(max_tokens=2, ignore_eos=True), cache_salt=salt)
        )
        while engine.has_work:
            cached.extend(output.metrics.num_cached_tokens for output in engine.step() if output.finished)
    assert cached == [0, 0, 12, 0, 12, 12, 0]


def test_a_request_that_may_choose_nothing_fails_alone() -> None:
    engine = fake_engine()
    good = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request(create_request(engine, "good", [7, 8], good))
    engine.add_request(create_request(engine, "bad", [9], SamplingParams(allowed_token_ids=[EOS_ID], min_tokens=2)))
    engine.add_request(create_request(engine, "many", [3, 4, 5], SamplingParams(n=3, seed=1, max_tokens=4)))
    seen = Answers()
    while engine.has_work:
        seen.take(engine.step())
        check_integrity(engine.scheduler)
    failure, answer, many = seen["bad"], seen["good"], seen["many"]
    assert isinstance(failure, RequestFailure)
    assert "bad failed: no token may be chosen" in str(failure.error)
    assert isinstance(failure.error, UsageError)
    assert engine.metrics.num_finished_total["error"] == 1
    assert sum(engine.metrics.num_finished_total.values()) == 5
    assert isinstance(answer, OutputDelta)
    assert answer.outputs[0].token_ids == greedy([7, 8], 6)
    assert isinstance(many, OutputDelta)
    assert many.outputs == last([3, 4, 5], n=3, seed=1, max_tokens=4).outputs


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("kind", ["plain", "choices", "beams"])
def test_damaged_numbers_end_their_request_and_leave_the_cache(
    monkeypatch: pytest.MonkeyPatch, value: float, kind: str
) -> None:
    def damaged(token_ids: list[int]) -> np.ndarray:
        logits = fake_logits(token_ids)
        return np.full_like(logits, value) if token_ids[0] == 9 and len(token_ids) >= 20 else logits

    monkeypatch.setattr(fake_executor, "fake_logits", damaged)
    engine = fake_engine(block_size=4)
    params: dict[str, SamplingParams | BeamSearchParams] = {
        "plain": SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        "choices": SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True),
        "beams": BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True),
    }
    good = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for _ in range(2):  # the second time the good prompt is cached, and nothing of the bad one
        engine.add_request(create_request(engine, "bad", [9, *range(10, 26)], params[kind]))
        engine.add_request(create_request(engine, "good", list(range(7, 23)), good))
        seen = Answers()
        while engine.has_work:
            seen.take(engine.step())
            check_integrity(engine.scheduler)
        failure, answer = seen["bad"], seen["good"]
        assert isinstance(failure, RequestFailure)
        assert isinstance(failure.error, NumericalError)
        assert isinstance(answer, OutputDelta)
        assert answer.outputs[0].token_ids == greedy(list(range(7, 23)), 12)
    assert answer.metrics.num_cached_tokens == 12
    assert engine.metrics.num_corrupted_total == 2
    monkeypatch.setattr(fake_executor, "fake_logits", fake_logits)
    again = last([9, *range(10, 26)], engine, max_tokens=1)
    assert again.metrics.num_cached_tokens == 0


def test_all_requests_may_be_damaged_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fake_executor, "fake_logits", lambda _: np.full(VOCAB_SIZE, np.nan, np.float32))
    engine = fake_engine()
    for name in ("one", "two"):
        engine.add_request(create_request(engine, name, [7, 8], SamplingParams(n=2)))
    failures = engine.step()
    assert [failure.request_id for failure in failures] == ["one", "two"]
    assert "one failed: the model's logits contain NaN" in str(failures[0].error)  # type: ignore[union-attr]
    assert engine.metrics.num_finished_total == {"error": 4}
    assert not engine.has_work
    assert "all 2 requests of a step failed" in caplog.text


def test_extreme_biases_still_choose_something() -> None:
    bias = dict.fromkeys(range(VOCAB_SIZE), -100.0)
    assert len(last([5], logit_bias=bias, max_tokens=3, ignore_eos=True).outputs[0].token_ids) == 3
    top = [VOCAB_SIZE - 1] * 3
    assert last(top, repetition_penalty=1.5, frequency_penalty=2.0, presence_penalty=-2.0, max_tokens=3).finished


def test_waste_of_the_paged_cache_is_small_on_a_mixed_load(record_property: Callable[[str, object], None]) -> None:
    engine = fake_engine(
        num_blocks=2048, block_size=16, max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=256
    )
    for i in range(24):
        prompt = [2 + (i * 7 + j * (i + 1)) % 60 for j in range(20 + (i * 97) % 700)]
        params = SamplingParams(max_tokens=8 + i % 20, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request(create_request(engine, str(i), prompt, params))
    while engine.has_work:
        engine.step()
    waste = engine.metrics.kv_waste_since(EngineMetrics())
    record_property("kv_waste", f"{waste:.2%}")
    sys.stderr.write(f"KV cache slots allocated and not used: {waste:.2%}\n")
    assert 0 < waste < 0.04


def test_one_run_of_these_tests_is_on_torch_tensors(request: pytest.FixtureRequest) -> None:
    executor = fake_engine().executor
    assert isinstance(executor, FakeExecutor)
    assert (executor.real is not None) == request.node.name.endswith("[torch]")


def test_the_executor_sees_each_step_once_and_no_token_twice() -> None:
    engine = fake_engine(max_num_batched_tokens=64)
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    last(list(range(2, 42)), engine, max_tokens=5, ignore_eos=True, n=2, seed=1)
    assert executor.num_steps == 5
    assert executor.num_tokens == 40 + 2 * 4


@pytest.mark.parametrize(
    ("params", "num_steps", "status"),
    [
        (SamplingParams(max_tokens=20, ignore_eos=True), 0, "waiting"),
        (SamplingParams(max_tokens=20, ignore_eos=True), 2, "prefill"),
        (SamplingParams(max_tokens=20, ignore_eos=True), 5, "decode"),
        (SamplingParams(n=3, max_tokens=20, ignore_eos=True), 2, "prefill"),
        (SamplingParams(n=3, max_tokens=20, ignore_eos=True), 5, "decode"),
        (SamplingParams(n=8, max_tokens=20, ignore_eos=True), 5, "queued choices"),
        (BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True), 2, "prefill"),
        (BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True), 6, "decode"),
        (SamplingParams(n=3, max_tokens=20, ignore_eos=True), 6, "preempted"),
        (BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True), 6, "preempted"),
    ],
)
def test_an_abort_frees_all_blocks_in_every_phase(
    params: SamplingParams | BeamSearchParams, num_steps: int, status: str
) -> None:
    engine = fake_engine(num_blocks=19 if status == "preempted" else 64, max_num_seqs=6, max_num_batched_tokens=12)
    good = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request(create_request(engine, "good", [7, 8], good))
    for _ in range(12 if status == "preempted" else 0):
        engine.step()
    request = create_request(engine, "left", list(range(10, 40)), params, priority=1)
    engine.add_request(request)
    for _ in range(num_steps):
        engine.step()
    while status == "preempted" and not request.num_preemptions:
        assert not request.is_finished
        engine.step()
    sequences = request.sequences
    phases = {sequence.status.value for sequence in sequences}
    expected = {"waiting": {"waiting"}, "queued choices": {"running", "waiting"}}.get(status)
    assert expected is None or phases == expected
    assert (request.num_generated_tokens == 0) == (status in ("waiting", "prefill"))
    output = engine.abort("left")
    check_integrity(engine.scheduler)
    assert output is not None
    assert {choice.finish_reason for choice in output.outputs} == {"abort"}
    assert all(not sequence.block_tables for sequence in sequences)
    assert engine.abort("left") is None
    answer = answers_of(engine)["good"]
    assert isinstance(answer, OutputDelta)
    assert answer.outputs[0].token_ids == greedy([7, 8], 40)
    assert engine.metrics.num_used_blocks == 0
