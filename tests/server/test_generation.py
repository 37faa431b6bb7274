"""From a spec to events, over an engine that answers by script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from octavo.errors import EngineDeadError, GenerationTimeoutError, OverloadedError, UsageError
from octavo.generation_request import GenerationRequest, RequestOptions
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from octavo.server.admission import Admission
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.generation.content import plain
from octavo.server.generation.events import (
    Choice,
    ChoiceEnd,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from octavo.server.generation.running import Generation, start_generation
from octavo.server.generation.spec import ChatSpec, NamedTool, TextSpec
from octavo.server.models.model_manager import ModelManager
from octavo.server.server_state import ServerState
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import MAX_MODEL_LEN, FakeClient, Script, fake_model
from tests.support.scripted_server import with_template
from tests.support.waiting import wait_until_async

USER = {"role": "user", "content": plain("Hi")}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}
STRICT_SUB = {"type": "function", "function": {**SUB["function"], "strict": True}}  # type: ignore[dict-item]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def make_state(**config: Any) -> ServerState:
    settings = ServerConfig(**config)
    manager = ModelManager({}, None)  # type: ignore[arg-type]  # nobody asks it for a model here
    return ServerState(config=settings, models=manager, admission=Admission(settings))


class Harness:
    """A fake engine with a state around it. After `run`, nothing may be left running."""

    def __init__(self, tokenizer: Tokenizer, script: Script | Callable[[GenerationRequest], Script], **config: Any):
        self.client = FakeClient(tokenizer, script)
        self.model = fake_model(tokenizer, self.client)
        self.config = config

    def run(self, work: Callable[[ServerState], Coroutine[Any, Any, Any]]) -> Any:
        async def whole() -> Any:
            state = make_state(**self.config)
            try:
                return await work(state)
            finally:
                assert state.admission.num_requests == 0
                assert all(stream.is_closed for stream in self.client.streams)

        try:
            return asyncio.run(whole())
        finally:
            self.model.prompts.close()

    def events(self, spec: ChatSpec | TextSpec) -> list[Event]:
        """All events of a request."""

        async def work(state: ServerState) -> list[Event]:
            return [event async for event in await self.start(state, spec)]

        return list(self.run(work))

    async def start(self, state: ServerState, spec: ChatSpec | TextSpec, request_id: str = "r") -> Generation:
        return await start_generation(state, self.model, spec, request_id)


def choices_of(events: Sequence[Event]) -> list[Choice]:
    choices: dict[int, Choice] = {}
    for event in events:
        if not isinstance(event, Usage):
            choices.setdefault(event.index, Choice()).push(event)
    return [choices[index] for index in sorted(choices)]


def chat(**fields: Any) -> ChatSpec:
    return ChatSpec(**{"params": SamplingParams(max_tokens=None), "messages": [USER], **fields})


def text(*prompts: str | list[int], **fields: Any) -> TextSpec:
    return TextSpec(**{"params": SamplingParams(), "prompts": prompts or ["a"], **fields})


def test_events_of_several_choices(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script(["Hel", "lo"], num_cached_tokens=3))
    events = harness.events(chat(params=SamplingParams(n=2, logprobs=1)))
    assert [choice.text for choice in choices_of(events)] == ["Hello", "Hello"]
    assert isinstance(events[-1], Usage)
    assert events[-1].num_cached_tokens == 3
    assert events[-1].num_completion_tokens == sum(len(choice.token_ids) for choice in choices_of(events))
    assert all(len(choice.logprobs) == len(choice.token_ids) for choice in choices_of(events))
    assert sum(isinstance(event, ChoiceEnd) for event in events) == 2


@pytest.mark.parametrize(
    ("is_batch", "tools", "kind"),
    [
        (True, (), RequestOutputKind.FINAL_ONLY),
        (True, (ADD,), RequestOutputKind.CUMULATIVE),  # a call may end it early
        (False, (), RequestOutputKind.CUMULATIVE),  # the first output tells that it has begun
    ],
)
def test_a_line_of_a_batch_has_one_output(
    smollm2_tokenizer: Tokenizer, is_batch: bool, tools: tuple[Any, ...], kind: RequestOutputKind
) -> None:
    harness = Harness(smollm2_tokenizer, Script(["Hello"]))

    async def work(state: ServerState) -> list[Event]:
        spec = chat(tools=tools)
        return [event async for event in await start_generation(state, harness.model, spec, "r", is_batch=is_batch)]

    assert choices_of(harness.run(work))[0].text == "Hello"
    assert harness.client.requests[-1].params.output_kind is kind


def test_several_prompts_have_choices_in_their_order(smollm2_tokenizer: Tokenizer) -> None:
    def script(request: GenerationRequest) -> Script:
        return Script([str(len(request.prompt.token_ids)), "!"], delay_s=0.01 if request.text == "a" else 0.0)

    harness = Harness(smollm2_tokenizer, script)
    events = harness.events(text([1], [1, 2], params=SamplingParams(n=2)))
    assert [choice.text for choice in choices_of(events)] == ["1!", "1!", "2!", "2!"]
    assert isinstance(events[-1], Usage)
    assert events[-1].num_prompt_tokens == 3
    assert events[-1].metrics.num_generated_tokens == 8


def test_what_the_engine_gets(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script())
    harness.events(text("a", options=RequestOptions(priority=3, cache_salt="s"), tenant="t"))
    harness.events(text("a", options=RequestOptions(priority=3), tenant="t"))
    harness.events(text("a"))
    salted, of_tenant, plain = harness.client.requests
    assert salted.options.priority == 3
    assert plain.options.cache_salt == ""
    assert len({salted.options.cache_salt, of_tenant.options.cache_salt, ""}) == 3


def test_tokens_without_text_come_with_the_next_text(smollm2_tokenizer: Tokenizer) -> None:
    """Half a character is not text, but its token and its log-probability are not lost."""
    harness = Harness(smollm2_tokenizer, Script([("", [3]), ("x", [4]), ("", [5])]))
    events = harness.events(text(params=SamplingParams(logprobs=0)))
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [(delta.text, delta.token_ids) for delta in deltas] == [("x", (3, 4)), ("", (5,))]
    assert [len(delta.logprobs) for delta in deltas] == [2, 1]


# --- tools ---


def test_a_model_without_tools_in_its_template_is_taught(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script(["I call. ", CALL[:20], CALL[20:]]))
    events = harness.events(chat(tools=[ADD]))
    (choice,) = choices_of(events)
    assert choice.finish_reason == "tool_calls"
    assert choice.text == "I call."
    assert [(call.name, call.arguments) for call in choice.tool_calls] == [("add", '{"a": 1}')]
    assert choice.tool_calls[0].call_id.startswith("call_")
    prompt = smollm2_tokenizer.decode(harness.client.requests[0].prompt.token_ids, skip_special_tokens=False)
    assert '"name": "add"' in prompt


def test_tools_that_must_not_be_called_are_not_shown(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script([CALL]))
    (choice,) = choices_of(harness.events(chat(tools=[ADD], tool_choice="none")))
    assert choice.text == CALL
    prompt = smollm2_tokenizer.decode(harness.client.requests[0].prompt.token_ids, skip_special_tokens=False)
    assert "add" not in prompt


@pytest.mark.parametrize(("choice", "others"), [("required", True), (NamedTool("sub"), False)])
def test_a_tool_that_must_be_called_is_enforced(smollm2_tokenizer: Tokenizer, choice: Any, others: bool) -> None:
    harness = Harness(smollm2_tokenizer, Script([CALL]))
    harness.events(chat(tools=[ADD, SUB], tool_choice=choice))
    params = harness.client.requests[0].params
    assert isinstance(params, SamplingParams)
    assert params.structured_outputs is not None
    grammar = params.structured_outputs.grammar or ""
    assert "sub" in grammar
    assert ('\\"add' in grammar) is others


def test_one_call_where_only_one_is_wanted(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script([CALL, "\n" + CALL, " more"]))
    two = choices_of(harness.events(chat(tools=[ADD])))[0]
    one = choices_of(harness.events(chat(tools=[ADD], parallel_tool_calls=False)))[0]
    assert len(two.tool_calls) == 2
    assert len(one.tool_calls) == 1
    assert one.finish_reason == "tool_calls"


def test_a_call_that_was_cut_off(smollm2_tokenizer: Tokenizer) -> None:
    """The answer has the arguments that came, and the true reason for its end."""
    harness = Harness(smollm2_tokenizer, Script([CALL[:45]], finish_reason="length"))
    (choice,) = choices_of(harness.events(chat(tools=[ADD])))
    assert choice.finish_reason == "length"
    assert choice.tool_calls[0].name == "add"


def test_a_call_in_any_pieces_is_the_same(smollm2_tokenizer: Tokenizer) -> None:
    whole = "Yes. " + CALL
    answers = set()
    for size in (1, 2, 3, 7, len(whole)):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        (choice,) = choices_of(Harness(smollm2_tokenizer, Script(pieces)).events(chat(tools=[ADD])))
        answers.add((choice.text, choice.tool_calls[0].name, choice.tool_calls[0].arguments, choice.finish_reason))
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"params": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))}, "tools"),
        ({"params": BeamSearchParams(beam_width=2), "tool_choice": "required"}, "tool_choice"),
        ({"params": BeamSearchParams(beam_width=2), "tools": [ADD, STRICT_SUB]}, "tools[1].function.strict"),
    ],
)
def test_contradictions_with_tools(smollm2_tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    harness = Harness(smollm2_tokenizer, Script())
    with pytest.raises(UsageError) as caught:
        harness.events(chat(**{"tools": [ADD], **fields}))
    assert caught.value.param == param


def test_a_fault_in_the_grammar_of_tools_names_the_tools(smollm2_tokenizer: Tokenizer) -> None:
    error = UsageError(
        "structured_outputs.grammar is wrong", param="structured_outputs.grammar", code="invalid_grammar"
    )
    harness = Harness(smollm2_tokenizer, Script(refusal=error))
    with pytest.raises(UsageError) as caught:
        harness.events(chat(tools=[ADD], tool_choice="required"))
    assert (caught.value.param, str(caught.value)) == ("tools", "tools is wrong")


# --- thinking ---


def thinking_tokenizer(tokenizer: Tokenizer, opens: bool) -> Tokenizer:
    """SmolLM2's, with a template of a model that thinks, which may open the thinking itself."""
    end = "<think>\n" if opens else ""
    return with_template(tokenizer, "{% for m in messages %}{{ m.content }}</think>{% endfor %}" + end)


@pytest.mark.parametrize("opens", [False, True])
def test_thinking_is_told_apart(smollm2_tokenizer: Tokenizer, opens: bool) -> None:
    said = "hm, well</think>\n\nFine"
    pieces = [*(("" if opens else "<think>") + said)]
    harness = Harness(thinking_tokenizer(smollm2_tokenizer, opens), Script(pieces))
    events = harness.events(chat())
    (choice,) = choices_of(events)
    assert (choice.reasoning, choice.text) == ("hm, well", "Fine")
    assert any(isinstance(event, ReasoningDelta) for event in events)
    assert isinstance(events[-1], Usage)
    assert 0 < events[-1].num_reasoning_tokens < events[-1].num_completion_tokens


def test_an_answer_with_a_form_is_no_thinking(smollm2_tokenizer: Tokenizer) -> None:
    """The template opens the thinking, and the form leaves no room for it."""
    harness = Harness(thinking_tokenizer(smollm2_tokenizer, True), Script(['{"a": 1}']))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    (choice,) = choices_of(harness.events(chat(params=params)))
    assert (choice.reasoning, choice.text) == (None, '{"a": 1}')


def test_a_call_after_thinking(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(thinking_tokenizer(smollm2_tokenizer, False), Script(["<think>I call", "</think>", CALL]))
    events = harness.events(chat(tools=[ADD]))
    (choice,) = choices_of(events)
    assert choice.reasoning == "I call"
    assert [call.name for call in choice.tool_calls] == ["add"]
    assert any(isinstance(event, ToolCallDelta) for event in events)


# --- lengths ---


def test_prompts_that_do_not_fit(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script())
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        with pytest.raises(UsageError) as caught:
            harness.events(text([5] * length, params=SamplingParams(max_tokens=1)))
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        assert str(MAX_MODEL_LEN) in str(caught.value)
    assert not harness.client.requests


def test_max_tokens_is_cut_to_the_rest_of_the_context(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script(["a", "b"]))
    for length, max_tokens in ((1, 1), (1, 16), (56, 57), (56, 56), (56, 55), (56, None)):
        prompt = [5] * (MAX_MODEL_LEN - length)
        harness.events(text(prompt, params=SamplingParams(max_tokens=max_tokens)))
    assert [request.params.max_tokens for request in harness.client.requests] == [1, 1, 56, 56, 55, None]


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [
        (4, "left", [6, 7, 8, 9]),
        (4, "right", [0, 1, 2, 3]),
        (4, "middle", [0, 1, 8, 9]),
        (3, "middle", [0, 1, 9]),
        (1, "middle", [0]),
        (10, "left", list(range(10))),
        (None, "left", list(range(10))),
    ],
)
def test_truncation(smollm2_tokenizer: Tokenizer, limit: int | None, side: Any, kept: list[int]) -> None:
    async def work(state: ServerState) -> int:
        spec = text(list(range(10)), truncate_prompt_tokens=limit, truncation_side=side)
        generation = await harness.start(state, spec)
        await generation.aclose()
        return generation.num_truncated_tokens

    harness = Harness(smollm2_tokenizer, Script())
    assert harness.run(work) == 10 - len(kept)
    assert harness.client.requests[0].prompt.token_ids == tuple(kept)


@pytest.mark.parametrize(("max_tokens", "kept"), [(56, 200), (None, 192)])
def test_truncation_to_what_fits(smollm2_tokenizer: Tokenizer, max_tokens: int | None, kept: int) -> None:
    harness = Harness(smollm2_tokenizer, Script())
    harness.events(text([5] * 1000, params=SamplingParams(max_tokens=max_tokens), truncate_prompt_tokens=-1))
    assert len(harness.client.requests[0].prompt.token_ids) == kept


def test_the_oldest_turns_of_a_conversation_make_room(smollm2_tokenizer: Tokenizer) -> None:
    """The whole is 256 tokens; what is left out is told, and the last turn stays even if it is too long alone."""
    turns = [{"role": role, "content": plain(f"{word} " * 40)} for word in "abcd" for role in ("user", "assistant")]
    question = {"role": "user", "content": plain("last")}
    harness = Harness(smollm2_tokenizer, Script())
    fields = {"truncate_prompt_tokens": -1, "truncation_side": "turns"}
    system = {"role": "system", "content": plain("Be brief.")}
    events = harness.events(chat(messages=[system, *turns, question], **fields))
    prompt = smollm2_tokenizer.decode(harness.client.requests[0].prompt.token_ids)
    assert "Be brief." in prompt
    assert "a a a" not in prompt
    assert "d d d" in prompt
    assert len(harness.client.requests[0].prompt.token_ids) <= 192
    assert isinstance(events[-1], Usage)
    harness.events(chat(messages=[{"role": "user", "content": plain("first " + "word " * 900 + "end")}], **fields))
    cut = smollm2_tokenizer.decode(harness.client.requests[1].prompt.token_ids)
    assert "first" in cut
    assert "end" in cut


def test_a_conversation_that_renders_to_nothing(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(with_template(smollm2_tokenizer, "{{ '' }}"), Script())
    with pytest.raises(UsageError) as caught:
        harness.events(chat())
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_value")


TEMPLATES = {
    "attributes of Python objects": ("{{ messages.__class__.__mro__ }}", ApiError, None),
    "nested loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", ApiError, None),
    "exception of the template": ("{{ raise_exception('roles must alternate') }}", UsageError, "messages"),
}


@pytest.mark.parametrize(("template", "kind", "param"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_that_fail(
    smollm2_tokenizer: Tokenizer, template: str, kind: type[Exception], param: str | None
) -> None:
    harness = Harness(with_template(smollm2_tokenizer, template), Script())
    with pytest.raises(kind) as caught:
        harness.events(chat())
    assert getattr(caught.value, "param", None) == param
    if isinstance(caught.value, ApiError):
        assert (caught.value.status, caught.value.code) == (500, "internal_error")
    else:
        assert "roles must alternate" in str(caught.value)


# --- ends ---


def test_closing_aborts(smollm2_tokenizer: Tokenizer) -> None:
    async def work(state: ServerState) -> None:
        for num_read in (0, 1):
            generation = await harness.start(state, text("a", "b", params=SamplingParams(n=2)))
            for _ in range(num_read):
                await generation.__anext__()
            await generation.aclose()
            await generation.aclose()
            assert all(stream.was_aborted for stream in harness.client.streams)

    harness = Harness(smollm2_tokenizer, Script(never_ends=True))
    harness.run(work)


def test_cancelling_the_reader_aborts(smollm2_tokenizer: Tokenizer) -> None:
    async def work(state: ServerState) -> None:
        generation = await harness.start(state, text())
        reader = asyncio.create_task(generation.__anext__())  # type: ignore[arg-type]
        await wait_until_async(lambda: harness.client.streams)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await generation.aclose()

    harness = Harness(smollm2_tokenizer, Script([], never_ends=True))
    harness.run(work)


def test_the_cancel_route_ends_it(smollm2_tokenizer: Tokenizer) -> None:
    async def work(state: ServerState) -> None:
        generation = await harness.start(state, text(tenant="me", options=RequestOptions(cache_salt="x")), "mine")
        assert not state.admission.cancel("mine", "you")
        assert state.admission.cancel("mine", "me")
        with pytest.raises(ApiError) as caught:
            [event async for event in generation]
        assert caught.value.code == "request_cancelled"

    harness = Harness(smollm2_tokenizer, Script(never_ends=True))
    harness.run(work)


def test_a_request_that_runs_too_long(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script(never_ends=True), request_timeout=0.05)
    with pytest.raises(GenerationTimeoutError):
        harness.events(text())


def test_an_engine_that_dies(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script(["a"], error=EngineDeadError("gone")))
    with pytest.raises(EngineDeadError):
        harness.events(text("a", "b"))


def test_an_engine_that_refuses(smollm2_tokenizer: Tokenizer) -> None:
    """The second of two prompts: the first one must not go on."""

    def script(request: GenerationRequest) -> Script:
        error = OverloadedError("restarting", code="engine_restarting")
        return Script(never_ends=True, refusal=error if len(request.prompt.token_ids) == 2 else None)

    harness = Harness(smollm2_tokenizer, script)
    with pytest.raises(OverloadedError):
        harness.events(text([1], [1, 2]))


def test_an_engine_that_ends_a_request_by_itself(smollm2_tokenizer: Tokenizer) -> None:
    harness = Harness(smollm2_tokenizer, Script(["a"], finish_reason="abort"))
    with pytest.raises(EngineDeadError):
        harness.events(text())


def test_a_full_server(smollm2_tokenizer: Tokenizer) -> None:
    async def work(state: ServerState) -> None:
        first = await harness.start(state, text(params=SamplingParams(n=16)), "first")
        with pytest.raises(OverloadedError) as caught:
            await harness.start(state, text(), "second")
        assert caught.value.code == "server_overloaded"
        await first.aclose()
        await (await harness.start(state, text(), "third")).aclose()

    harness = Harness(smollm2_tokenizer, Script(never_ends=True), max_queue=0)
    harness.run(work)
