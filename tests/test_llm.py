"""`LLM`: what scripts touch."""

from __future__ import annotations

import datetime
import gc
import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import pytest

from octavo import (
    LLM,
    BeamSearchParams,
    EngineDeadError,
    Prompt,
    RejectedPromptsError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    Span,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    UsageError,
)
from octavo.backends import PendingStep
from octavo.backends.memory import host_memory
from octavo.batch import Batch
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_model import use_fake_model
from tests.support.waiting import wait_until

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, seed=3)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> FakeExecutor:
    return use_fake_model(monkeypatch)


@pytest.fixture
def llm(executor: FakeExecutor) -> LLM:
    del executor
    with LLM("fake") as llm:
        yield llm


def test_one_text_and_many_and_token_ids(llm: LLM) -> None:
    (one,) = llm.generate("ab", PARAMS)
    assert one.prompt == "ab"
    assert one.prompt_token_ids == llm.encode("ab")
    (same,) = llm.generate(llm.encode("ab"), PARAMS)
    assert same.prompt is None
    assert same.outputs == one.outputs
    many = llm.generate(["ab", "abc", llm.encode("ab")], PARAMS)
    assert [output.prompt for output in many] == ["ab", "abc", None]
    assert many[0].outputs == many[2].outputs == one.outputs
    assert llm.generate([], PARAMS) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [PARAMS, SamplingParams(max_tokens=2, ignore_eos=True)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 2]
    with pytest.raises(UsageError, match="sampling_params has 1 items for 2 prompts"):
        llm.generate(["a", "b"], [PARAMS])
    with pytest.raises(UsageError, match="sampling_params must be a SamplingParams, not 'greedy'"):
        llm.generate(["a"], ["greedy"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="prompts must be a string, a list of token ids"):
        llm.generate(5, PARAMS)  # type: ignore[arg-type]


def test_without_parameters_sixteen_tokens_come(llm: LLM) -> None:
    (output,) = llm.generate("abc")
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_columns_of_data_frames_are_lists(llm: LLM) -> None:
    class Column:
        """A column as pandas gives it."""

        def __init__(self, values: list[Any]) -> None:
            self.tolist = lambda: values

    expected = [output.outputs for output in llm.generate(["abc", "ab"], PARAMS)]
    for texts in (Column(["abc", "ab"]), np.array(["abc", "ab"]), np.array(["abc", "ab"], object)):
        assert [output.outputs for output in llm.generate(texts, PARAMS)] == expected  # type: ignore[arg-type]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    asked = llm.chat(Column(["abc", "ab"]), PARAMS, chat_template=template)  # type: ignore[arg-type]
    assert [output.outputs for output in asked] == expected
    assert llm.generate(np.array([5, 6]), PARAMS)[0].prompt_token_ids == [5, 6]  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="prompt 1 of 2: a prompt must be a string or a list of token ids, not nan"):
        llm.generate(Column(["abc", math.nan]), PARAMS)  # type: ignore[arg-type]


def test_a_conversation_has_no_limit_unless_one_is_given(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    endless = SamplingParams(ignore_eos=True, temperature=0)
    [answer] = llm.chat("abc", endless, chat_template=template)
    assert len(answer.outputs[0].token_ids) == 64 - len(answer.prompt_token_ids)
    [answer] = llm.chat("abc", SamplingParams(ignore_eos=True, max_tokens=16), chat_template=template)
    assert len(answer.outputs[0].token_ids) == 16
    assert len(llm.generate("abc", endless)[0].outputs[0].token_ids) == 16
    assert repr(llm) == "LLM('fake', max_model_len=64)"


def test_a_role_that_nobody_knows_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"message 0: the role is 'users'.*did you mean 'user'?"):
        llm.chat([{"role": "users", "content": "a"}], PARAMS, chat_template="{{ messages[0].content }}")
    known = "{% if messages[0].role == 'critic' %}abc{% endif %}"
    assert llm.chat([{"role": "critic", "content": "a"}], PARAMS, chat_template=known)


def test_a_single_wrong_prompt_is_its_own_error(llm: LLM) -> None:
    with pytest.raises(UsageError, match="the prompt has 100 tokens; the context of 64 allows"):
        llm.generate([5] * 100, PARAMS)
    with pytest.raises(UsageError, match="the prompt is empty"):
        llm.generate([[]], PARAMS)


def test_wrong_prompts_do_not_cost_the_answers_of_the_others(llm: LLM) -> None:
    with pytest.raises(RejectedPromptsError) as caught:
        llm.generate(["ab", [5] * 100, "abc", []], PARAMS)
    error = caught.value
    assert "prompt 1 of 4: the prompt has 100 tokens" in str(error)
    assert sorted(error.errors) == [1, 3]
    answered = [output is not None for output in error.outputs]
    assert answered == [True, False, True, False]
    assert error.outputs[0] is not None
    assert error.outputs[0].outputs == llm.generate("ab", PARAMS)[0].outputs


def test_a_request_that_cannot_be_sampled_does_not_cost_the_others(llm: LLM) -> None:
    impossible = SamplingParams(allowed_token_ids=[1], min_tokens=3)
    with pytest.raises(RejectedPromptsError, match="no token may be chosen") as caught:
        llm.generate(["ab", "ab"], [PARAMS, impossible])
    assert caught.value.outputs[0] is not None


def test_a_stream_joins_to_the_answer(llm: LLM) -> None:
    (whole,) = llm.generate("ab", PARAMS)
    parts = list(llm.stream("ab", PARAMS))
    assert all(isinstance(part, RequestOutput) for part in parts)
    assert [part.finished for part in parts] == [False] * 5 + [True]
    assert "".join(part.outputs[0].text for part in parts) == whole.outputs[0].text
    assert [token for part in parts for token in part.outputs[0].token_ids] == whole.outputs[0].token_ids
    with pytest.raises(UsageError, match="the prompt is empty"):
        llm.stream([])


def test_a_closed_or_forgotten_stream_ends_its_request(llm: LLM) -> None:
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    with llm.stream("ab", long) as stream:
        next(stream)
    assert list(stream) == []
    forgotten = llm.stream("abc", long)
    next(forgotten)
    del forgotten
    gc.collect()
    wait_until(lambda: not llm._session._engine.engine.has_work, seconds=10)
    assert not llm._session._engine.engine.has_work


def test_threads_share_the_model(llm: LLM, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = executor.submit

    def slow(batch: Batch) -> PendingStep:
        time.sleep(0.002)  # timed: no request is over before the other threads have begun theirs
        return submit(batch)

    monkeypatch.setattr(executor, "submit", slow)
    together = threading.Barrier(6)
    expected = llm.generate("abc", SamplingParams(max_tokens=30, ignore_eos=True, seed=1))[0].outputs
    answers = []

    def call() -> None:
        together.wait(60)
        answers.append(llm.generate("abc", SamplingParams(max_tokens=30, ignore_eos=True, seed=1))[0].outputs)

    before = executor.num_steps
    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 6
    assert executor.num_steps - before < 6 * 30  # steps are shared


def test_beam_search_gives_the_best_beams(llm: LLM) -> None:
    one, two = llm.beam_search(["ab", "abc"], BeamSearchParams(beam_width=3, max_tokens=5))
    assert len(one.sequences) == len(two.sequences) == 3
    best, *others = one.sequences
    assert all(best.cum_logprob >= beam.cum_logprob for beam in others)
    prompt = llm.encode("ab")
    assert best.tokens[: len(prompt)] == prompt
    assert best.text
    (single,) = llm.beam_search("ab", BeamSearchParams(beam_width=3, max_tokens=5))
    assert single == one


def test_prompts_in_every_form_of_vllm(llm: LLM) -> None:
    ids = llm.encode("ab")
    text: TextPrompt = {"prompt": "ab"}
    tokens: TokensPrompt = {"prompt_token_ids": ids}
    greedy = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate(["ab", ids, text, tokens], greedy)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [output.prompt for output in outputs] == ["ab", None, "ab", None]
    assert llm.generate(text, greedy)[0].outputs == llm.generate("ab", greedy)[0].outputs
    assert llm.get_tokenizer() is llm.tokenizer


def test_prompts_with_spans(llm: LLM) -> None:
    """Alone and among others, to generate, stream and embed; a model that takes no spans refuses them by name."""
    ids = llm.encode("abc")
    assert llm.encode(Prompt(ids)) == ids
    for prompts in (Prompt(ids), [Prompt(ids)], ["abc", Prompt(ids)]):
        assert llm.generate(prompts, PARAMS)[-1].outputs == llm.generate(ids, PARAMS)[0].outputs
    (vector,) = llm.embed(Prompt(ids))
    assert (vector.outputs, vector.prompt_token_ids) == (llm.embed(ids)[0].outputs, ids)

    spanned = Prompt([*ids, 0, 0], [Span(len(ids), 2, b"key", np.zeros((2, 3), np.float32))])
    for call in (llm.generate, llm.stream, llm.embed):
        with pytest.raises(UsageError, match="takes no images or embeddings"):
            call(spanned)  # type: ignore[operator]
    with pytest.raises(RejectedPromptsError) as rejected:
        llm.generate(["abc", spanned], PARAMS)
    assert list(rejected.value.errors) == [1]


def test_a_model_that_takes_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    executor.span_width = 3
    use_fake_model(monkeypatch, executor=executor)
    spanned = Prompt([5, 0, 0, 6], [Span(1, 2, b"key", np.zeros((2, 3), np.float32))])
    with LLM("fake") as llm:
        (output,) = llm.generate(spanned, PARAMS)
        assert output.prompt_token_ids == [5, 0, 0, 6]
        assert len(output.outputs[0].token_ids) == 6
        assert llm.embed([spanned])[0].prompt_token_ids == [5, 0, 0, 6]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": "a.png"}}, "the prompt has images, but fake reads text only"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "needs one of prompt and prompt_token_ids"),
        ({}, "needs one of prompt and prompt_token_ids"),
        ({"prompt": [1]}, "prompt is [1]; prompt must be a string"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids is 'a'"),
    ],
)
def test_wrong_prompts_of_vllms_form(llm: LLM, prompt: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        llm.generate(prompt)
    assert said in str(caught.value)


def test_chat_needs_a_template_and_takes_one(llm: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}]
    with pytest.raises(UsageError, match="no chat template"):
        llm.chat(messages, PARAMS)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (answer,) = llm.chat(messages, PARAMS, chat_template=template)
    assert answer.prompt_token_ids == llm.encode("abc")
    for many in ([messages, "abc"], ["abc", messages], ["abc", "abc"]):
        both = llm.chat(many, PARAMS, chat_template=template)
        assert [output.outputs for output in both] == [answer.outputs] * 2
    assert llm.chat("abc", PARAMS, chat_template=template)[0].outputs == answer.outputs


@pytest.mark.parametrize("wrong", [b"bytes", None, 5])
def test_what_is_no_prompt_is_refused(llm: LLM, wrong: object) -> None:
    with pytest.raises(UsageError, match="must be a string"):
        llm.generate(wrong, PARAMS)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a prompt must be a string or a list of token ids"):
        llm.stream(wrong, PARAMS)  # type: ignore[arg-type]


def test_what_is_no_conversation_is_refused(llm: LLM) -> None:
    for wrong in ([["hello"]], [5]):
        with pytest.raises(UsageError, match="a message must be a mapping such as"):
            llm.chat(wrong, PARAMS)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [[], (), None, 5, {"role": "user", "content": "x"}])
def test_an_empty_conversation_is_refused(llm: LLM, wrong: object) -> None:
    with pytest.raises(UsageError, match="a conversation must be a list of one or more messages"):
        llm.chat(wrong, PARAMS, chat_template="x")  # type: ignore[arg-type]


def test_a_template_that_is_no_text_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="chat_template must be the text of a Jinja template, not 5"):
        llm.chat([{"role": "user", "content": "x"}], PARAMS, chat_template=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["", "greedy", {"max_tokens": 3}, 0, False])
def test_what_are_no_parameters_is_refused(llm: LLM, wrong: object) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(UsageError, match="sampling_params must be a SamplingParams, not"):
            call("ab", wrong)  # type: ignore[operator]
    with pytest.raises(UsageError, match="sampling_params has 0 items for 1 prompts"):
        llm.generate("ab", [])
    with pytest.raises(UsageError, match="beam_search takes BeamSearchParams"):
        llm.beam_search("ab", wrong)  # type: ignore[arg-type]


def test_a_failing_engine_raises_everywhere(llm: LLM, executor: FakeExecutor) -> None:
    executor.fails_at_step = executor.num_steps + 3
    with pytest.raises(EngineDeadError, match="told to fail"):
        llm.generate(["ab", "abc"], PARAMS)
    with pytest.raises(EngineDeadError, match="the engine has stopped"):
        llm.generate("ab", PARAMS)
    with pytest.raises(EngineDeadError):
        llm.stream("ab")


def test_after_close_there_is_a_clear_error(executor: FakeExecutor) -> None:
    llm = LLM("fake")
    llm.close()
    llm.close()
    assert executor.is_closed
    with pytest.raises(UsageError, match="this model is closed"):
        llm.generate("ab", PARAMS)


def test_a_forgotten_model_closes_itself(executor: FakeExecutor) -> None:
    llm = LLM("fake")
    llm.generate("ab", PARAMS)
    thread = llm._session._engine._thread
    del llm
    gc.collect()
    assert executor.is_closed
    assert not thread.is_alive()


def test_a_script_that_never_closes_ends_quietly(smollm2_path: Path) -> None:
    code = (
        "import sys; from octavo import LLM, SamplingParams; llm = LLM(sys.argv[1], max_model_len=1024);"
        "stream = llm.stream('Once', SamplingParams(max_tokens=500, ignore_eos=True)); next(stream)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(smollm2_path)], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean max_model_len"):
        LLM("fake", max_model_length=5)


@pytest.mark.parametrize("backend", ["cuda", "sampling", "cpu.compiler"])
def test_unknown_backends_are_named(smollm2_path: Path, backend: str) -> None:
    with pytest.raises(UsageError, match=f"there is no backend '{backend}'; use 'cpu', 'torch' or"):
        LLM(str(smollm2_path), backend=backend)


def test_progress_of_loading_is_reported(executor: FakeExecutor) -> None:
    del executor
    seen: list[tuple[str, int, int]] = []
    LLM("fake", load_progress=lambda *report: seen.append(report)).close()
    assert seen == [("packing", 1, 1)]


def test_priority_is_checked_and_obeyed(llm: LLM) -> None:
    with pytest.raises(UsageError, match="priority is 1000000000000"):
        llm.generate("ab", PARAMS, priority=10**12)
    assert len(llm.generate(["ab", "abc"], PARAMS, priority=[1, 0])) == 2


def test_importing_is_light() -> None:
    code = "import sys, time; t = time.process_time(); import octavo; s = time.process_time() - t; print(s);" + (
        "heavy = {'numpy', 'tokenizers', 'huggingface_hub', 'jinja2', 'rich', 'click'} & set(sys.modules);"
        "assert not heavy, heavy; octavo.SamplingParams; print(sorted(dir(octavo))[0])"
    )
    seconds = [
        float(
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[0]
        )
        for _ in range(3)
    ]
    assert min(seconds) < 0.15


def test_all_public_names_exist() -> None:
    import octavo

    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        octavo.nothing  # noqa: B018


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_the_default_model_answers_and_gives_its_memory_back(smollm2_path: Path) -> None:
    gc.collect()
    for attempt in range(2):
        with LLM(str(smollm2_path), kv_cache_memory="256MiB") as llm:
            (answer,) = llm.chat(
                [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
                SamplingParams(temperature=0, max_tokens=12),
            )
            assert "Paris" in answer.outputs[0].text
            assert answer.outputs[0].finish_reason in ("stop", "length")
            loaded = rss_bytes()
        if attempt == 0:
            first = rss_bytes()
    gc.collect()
    assert rss_bytes() < first + 32 * 2**20, "memory grows from one model to the next"
    assert rss_bytes() < loaded
    assert host_memory().available_bytes > 0


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LLM:
    with LLM(str(smollm2_path), kv_cache_memory="512MiB", max_num_seqs=16, max_num_batched_tokens=128) as llm:
        yield llm


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "1, 2, 3, 4,",
    "Water boils at",
    "The quick brown fox",
]


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_the_default_model_answers_alike_alone_and_in_every_batch(smollm2: LLM, kind: str) -> None:
    if kind == "greedy":
        params = SamplingParams(temperature=0, max_tokens=16, logprobs=1)
    else:
        params = SamplingParams(n=2, seed=5, top_p=0.9, max_tokens=12, presence_penalty=0.5)
    together = smollm2.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, together, strict=True):
        (alone,) = smollm2.generate(prompt, params)
        assert alone.outputs == output.outputs
    backwards = smollm2.generate(PROMPTS[::-1], params)
    assert [output.outputs for output in backwards[::-1]] == [output.outputs for output in together]


def test_a_preempted_answer_of_the_default_model_is_the_same(smollm2_path: Path, smollm2: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in smollm2.generate(PROMPTS, params)]
    # Room for a dozen blocks of 16 tokens, so that six requests of up to 57 tokens push each other out.
    memory = 12 * 16 * smollm2._session.model().executor.cache_sizes.token_bytes
    with LLM(str(smollm2_path), kv_cache_memory=memory, max_model_len=128, max_num_seqs=8) as cramped:
        outputs = cramped.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_an_int8_cache_holds_more_and_shares_prefixes(smollm2_path: Path) -> None:
    prompt = [(7 * i * i + 3 * i) % 40000 + 20 for i in range(70)]
    params = SamplingParams(temperature=0, n=2, max_tokens=6, logprobs=0)
    num_blocks = {}
    for kv_dtype in ("float16", "int8"):
        with LLM(str(smollm2_path), kv_cache_memory="16MiB", kv_dtype=kv_dtype) as llm:
            num_blocks[kv_dtype] = llm._session.model().engine.limits.num_blocks
            (first,) = llm.generate(prompt, params)
            second, other = llm.generate([prompt, [*prompt[:40], 5, 6]], params)
        assert (first.num_cached_tokens, second.num_cached_tokens, other.num_cached_tokens) == (0, 64, 32)
        assert second.outputs == first.outputs
    assert num_blocks["int8"] >= 1.9 * num_blocks["float16"]


def test_log_probabilities_of_what_was_drawn_from(smollm2: LLM) -> None:
    """Beside answers that have the model's own, which stay what they are."""
    drawn = {"temperature": 0.8, "seed": 3, "max_tokens": 6, "top_k": 4, "ignore_eos": True}
    raw = SamplingParams(**drawn, logprobs=5)
    processed = SamplingParams(**drawn, logprobs=5, processed_logprobs=True)
    (plain,) = smollm2.generate(PROMPTS[0], raw)
    together = smollm2.generate([PROMPTS[0], PROMPTS[1], PROMPTS[0]], [raw, processed, processed])
    assert together[0].outputs == plain.outputs
    (found,) = together[2].outputs
    assert found.token_ids == plain.outputs[0].token_ids
    for token_id, own, model in zip(found.token_ids, found.logprobs, plain.outputs[0].logprobs, strict=True):
        assert sum(math.exp(entry.logprob) for entry in own.values()) == pytest.approx(1, abs=1e-5)
        best = sorted(model.values(), key=lambda entry: entry.rank)[:4]
        weights = [math.exp(entry.logprob / 0.8) for entry in best]
        wanted = [weight / sum(weights) for weight in weights]
        shown = sorted(own.values(), key=lambda entry: entry.rank)
        assert [math.exp(entry.logprob) for entry in shown] == pytest.approx(wanted, rel=1e-3)
        assert own[token_id].rank <= 4


def test_a_long_prompt_in_chunks_beside_others_gives_the_same_answer(smollm2: LLM) -> None:
    prompt = [(7 * i * i + 3 * i) % 40000 + 20 for i in range(300)]  # more than two steps of 128 tokens
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    (alone,) = smollm2.generate(prompt, params)
    beside = smollm2.generate([[*prompt[:1], 5, *prompt[1:]], prompt, "The sea"], params)
    assert beside[1].outputs == alone.outputs
    assert alone.num_cached_tokens == 0
    assert beside[1].num_cached_tokens == 288


def test_the_second_turn_finds_the_first_in_the_cache(smollm2: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me about the sea, in a few words. " * 5}]
    params = SamplingParams(temperature=0, max_tokens=20)
    (first,) = smollm2.chat(messages, params)
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "And the sky?"}]
    (second,) = smollm2.chat(messages, params)
    assert second.num_cached_tokens >= first.metrics.num_prompt_tokens - 16
    assert second.metrics.num_cached_tokens == second.num_cached_tokens


def test_control_tokens_in_a_prompt_count(smollm2: LLM) -> None:
    assert len(smollm2.encode("<|im_start|>user")) == 2
    assert smollm2.encode_chat([{"role": "user", "content": "<|im_start|>"}]).count(1) == 3  # system, user, answer


def test_output_kinds_do_not_disturb_generate(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, output_kind=RequestOutputKind.DELTA)
    (output,) = smollm2.generate("The capital of France is", params)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["qwen_0_5b_path", "qwen_1_5b_path"])
def test_larger_models_answer_alike_alone_and_in_a_batch(fixture: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(fixture)
    params = SamplingParams(n=2, seed=5, temperature=0.8, top_p=0.9, max_tokens=24, logprobs=1)
    with LLM(str(path), kv_cache_memory="512MiB", max_num_batched_tokens=128) as llm:
        together = llm.generate(PROMPTS, params)
        for prompt, output in zip(PROMPTS, together, strict=True):
            assert llm.generate(prompt, params)[0].outputs == output.outputs


class Trip(pydantic.BaseModel):
    """A class whose schema says nothing about further properties."""

    city: Annotated[str, pydantic.Field(pattern='^[^"]{1,9}$')]
    day: datetime.date
    kind: Literal["bus", "train"]


def test_answers_follow_a_pydantic_class_and_name_nothing_else(smollm2_path: Path) -> None:
    structured = StructuredOutputsParams(json=Trip)
    params = [SamplingParams(max_tokens=80, seed=seed, structured_outputs=structured) for seed in range(3)]
    question = "Invent a trip as JSON with many details."
    with LLM(str(smollm2_path)) as llm:
        for output in llm.generate([question] * 3, params, closed_objects=True):
            text = output.outputs[0].text
            trip = Trip.model_validate_json(text)
            assert '"' not in trip.city
            assert set(json.loads(text)) == {"city", "day", "kind"}
        [answer] = llm.chat(question, params[0], closed_objects=True)
        assert Trip.model_validate_json(answer.outputs[0].text)
        with pytest.raises(UsageError, match="closed_objects must be True or False, not 1"):
            llm.generate("a", PARAMS, closed_objects=1)
