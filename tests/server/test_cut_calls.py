"""Answers with calls, cut at every character: by a limit, by a stop string, or because the request was cancelled.

Nothing of a call's markup may come out as text, in any format of calls and any protocol, and no half call as a whole
one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.outputs import CompletionOutput, RequestMetrics
from octavo.server.errors import ApiError
from octavo.server.generation.events import ChoiceReader, Event, ReasoningDelta, ToolCallDelta, Usage
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import AnswerWriter, Arrival
from octavo.server.protocols.anthropic.answer import MessagesWriter
from octavo.server.protocols.anthropic.request import MessagesRequest
from octavo.server.protocols.llama_cpp.answer import LlamaWriter
from octavo.server.protocols.llama_cpp.request import CompletionRequest
from octavo.server.protocols.ollama.answer import ChatWriter as OllamaChatWriter
from octavo.server.protocols.ollama.request import ChatRequest
from octavo.server.protocols.openai.answer import ChatWriter
from octavo.server.protocols.openai.chat_request import ChatCompletionRequest
from octavo.server.protocols.responses.answer import ResponsesWriter
from octavo.server.protocols.responses.request import ResponsesRequest
from octavo.server.protocols.tgi.answer import TgiWriter
from octavo.server.protocols.tgi.request import GenerateRequest
from octavo.server.reasoning.formats import harmony
from octavo.server.reasoning.reasoning_format import ReasoningParser
from octavo.server.tool_parsers.tool_format import ToolParser, tool_formats
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import fake_model
from tests.support.tool_outputs import CASES, TOOLS, Case

USER = {"role": "user", "content": "Hi"}
_HALF_WORD = re.compile(r"[A-Za-z]+$")  # such as the beginning of Python's True
USAGE = Usage(1, 0, 1, 0, RequestMetrics())


@dataclass(frozen=True)
class Shown:
    """An answer as a client sees it: its text, the arguments of its calls, and why it ended."""

    text: str
    calls: Sequence[Any]
    end: Any


@dataclass(frozen=True)
class Protocol:
    """request: a body for `stream` or not. read: the whole answer. text_of: the text in an event of the stream."""

    writer: type[AnswerWriter[Any, Any]]
    request: Callable[[bool], Any]
    read: Callable[[Any], Shown]
    text_of: Callable[[dict[str, Any]], str]


def _chat(body: Any) -> Shown:
    choice = body["choices"][0]
    calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
    return Shown(choice["message"]["content"] or "", calls, choice["finish_reason"])


def _responses(body: Any) -> Shown:
    texts = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
    calls = [item["arguments"] for item in body["output"] if item["type"] == "function_call"]
    return Shown("".join(texts), calls, body["status"])


def _messages(body: Any) -> Shown:
    texts = [block["text"] for block in body["content"] if block["type"] == "text"]
    calls = [block["input"] for block in body["content"] if block["type"] == "tool_use"]
    return Shown("".join(texts), calls, (body["stop_reason"], body["stop_sequence"]))


def _ollama(body: Any) -> Shown:
    calls = [call["function"]["arguments"] for call in body["message"].get("tool_calls", ())]
    return Shown(body["message"]["content"], calls, body.get("done_reason"))


def _delta(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


PROTOCOLS = {
    "chat": Protocol(ChatWriter, lambda stream: ChatCompletionRequest(messages=[USER], stream=stream), _chat, _delta),
    "responses": Protocol(
        ResponsesWriter,
        lambda stream: ResponsesRequest(input="Hi", stream=stream),
        _responses,
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "anthropic": Protocol(
        MessagesWriter,
        lambda stream: MessagesRequest(messages=[USER], max_tokens=1, stream=stream),
        _messages,
        lambda event: event.get("delta", {}).get("text", "") if event["type"] == "content_block_delta" else "",
    ),
    "ollama": Protocol(
        OllamaChatWriter,
        lambda stream: ChatRequest(messages=[USER], stream=stream),
        _ollama,
        lambda event: event["message"]["content"],
    ),
    "llama.cpp": Protocol(
        LlamaWriter,
        lambda stream: CompletionRequest(prompt="Hi", stream=stream),
        lambda body: Shown(body["content"], (), body["stop_type"]),
        lambda event: event["content"],
    ),
    "tgi": Protocol(
        TgiWriter,
        lambda stream: GenerateRequest(inputs="Hi", stream=stream),
        lambda body: Shown(body["generated_text"], (), None),
        lambda event: event["token"]["text"],
    ),
}


@pytest.fixture(scope="module")
def model(smollm2_tokenizer: Tokenizer) -> Iterator[ServedModel]:
    made = fake_model(smollm2_tokenizer)
    yield made
    made.prompts.close()


def reader_of(case: Case) -> ChoiceReader:
    """The reader of an answer in the format of this case; harmony's has channels too."""
    reasoning: ReasoningParser | None = harmony.FORMAT.create_parser("") if case.format == "harmony" else None
    return ChoiceReader(0, ToolParser(tool_formats()[case.format], TOOLS), reasoning)


def events_of(case: Case, pieces: Sequence[str], finish_reason: str | None, stop: str | None = None) -> list[Event]:
    """The events of an answer in these pieces. finish_reason: None if it is cancelled, so that no end comes."""
    reader = reader_of(case)
    outputs = [CompletionOutput(0, piece, [], finish_reason=None) for piece in pieces]
    if finish_reason is not None:
        outputs.append(CompletionOutput(0, "", [], finish_reason=finish_reason, stop_reason=stop))
    return [event for output in outputs for event in reader.push(output)]


def text_of(events: Sequence[Event]) -> str:
    return "".join(
        getattr(event, "text", "") for event in events if not isinstance(event, (ReasoningDelta, ToolCallDelta))
    )


@cache
def _request(protocol: Protocol, stream: bool) -> tuple[Any, Any]:
    request = protocol.request(stream)
    return request, request.to_spec("")


def arguments_of(events: Sequence[Event]) -> list[str]:
    """Of each call."""
    found: list[str] = []
    for event in events:
        if isinstance(event, ToolCallDelta):
            found += [""] if event.call_id else []
            found[-1] += event.arguments
    return found


def writer_of(protocol: Protocol, model: ServedModel, *, stream: bool) -> AnswerWriter[Any, Any]:
    request, spec = _request(protocol, stream)
    generation: Any = SimpleNamespace(
        request_id="r", prompt_token_ids=[[1]], num_truncated_tokens=0, prompt_logprobs=[None], ignored_fields=()
    )
    return protocol.writer(request, spec, model, generation, Arrival(0.0, 0.0))


@cache
def cuts_of(case: Case) -> tuple[tuple[list[Event], str | None], ...]:
    """The events of this answer after every cut, and the stop string that cut it."""
    return tuple(_cuts(case))


def _cuts(case: Case) -> Iterator[tuple[list[Event], str | None]]:
    for cut in range(len(case.text)):
        pieces = [case.text[:cut]]
        yield events_of(case, pieces, "length"), None
        yield events_of(case, pieces, "stop", case.text[cut]), case.text[cut]
        yield events_of(case, pieces, None), None


def of_format(name: str) -> list[Case]:
    return [case for case in CASES if case.format == name]


def longest(name: str) -> Case:
    """The longest answer of this format that has as many calls as any."""
    return max(of_format(name), key=lambda case: (len(case.calls), len(case.text)))


def distinct(cuts: Iterable[tuple[list[Event], str | None]]) -> Iterator[tuple[list[Event], str | None]]:
    """Of the cuts that give the same events one, whatever the stop string."""
    seen = set()
    for events, stop in cuts:
        shown = [(type(event), getattr(event, "text", ""), getattr(event, "arguments", "")) for event in events]
        if (key := (*shown, stop is None)) not in seen:
            seen.add(key)
            yield events, stop


@pytest.mark.parametrize("name", sorted(tool_formats()))
def test_the_text_of_a_cut_answer_is_a_beginning_of_the_whole_ones(name: str) -> None:
    """So markup is no text: the whole answer has it behind it, and shows none of it."""
    for case in of_format(name):
        whole = events_of(case, [case.text], "stop")
        names = {event.name for event in whole if isinstance(event, ToolCallDelta)}
        names |= {tool["function"]["name"] for tool in TOOLS}
        for events, stop in cuts_of(case):
            place = (case.name, stop, events)
            assert text_of(whole).startswith(text_of(events).rstrip()), place
            assert {event.name for event in events if isinstance(event, ToolCallDelta)} <= {*names, None}, place
            for cut, complete in zip(arguments_of(events), arguments_of(whole), strict=False):
                assert complete.replace('"', "").startswith(_HALF_WORD.sub("", cut).replace('"', "")), place


@pytest.mark.parametrize(
    ("name", "text", "stop", "shown"),
    [
        ("hermes", "Use `now`", "\n", "Use `now`"),  # a backtick and a line break begin no fence
        ("hermes", "Use `now`", "``json", "Use `now"),
        ("hermes", "1 < 2, 3 <", " 4", "1 < 2, 3 <"),
        ("hermes", "So <tool", "_call>", "So"),
        ("hermes", "So  \n", "\n", "So  \n"),
        ("mistral", "[TOOL_CALLS]no", "w", ""),  # half a name is no name
        ("functionary_recipients", "Hello there", ".", "Hello there"),
        ("functionary_recipients", "all\nSee >>> print", "(", "See >>> print"),
        ("functionary_recipients", "all\nSee >>>print", "(", "See"),
        ("llama3_json", 'So {"a": {"name": "now", "par', "\n", 'So {"a": {"name": "now", "par'),
    ],
)
def test_text_that_is_no_markup_is_kept_at_a_stop_string(name: str, text: str, stop: str, shown: str) -> None:
    assert text_of(events_of(Case(name, "", text), [text], "stop", stop)) == shown


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_answer_cut_anywhere_is_a_beginning_of_it(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(tool_formats())))
    answers = st.lists(st.sampled_from([case.text for case in CASES]), min_size=1, max_size=3).map("".join)
    text = data.draw(answers | st.text(alphabet='<>{}[]"\\:,;`/ \n|=_tolcanmergusfji', max_size=60))
    case, cut = Case(name, "", text), data.draw(st.integers(0, len(text)))
    whole, part = (text_of(events_of(case, [piece], end)) for piece, end in ((text, "stop"), (text[:cut], "length")))
    assert whole.startswith(part.rstrip())


def test_what_the_model_itself_has_ended_is_shown() -> None:
    for text in ("Hello <tool_", 'a {"name": "ru'):
        assert text_of(events_of(Case("hermes", "", text), [text], "stop")) == text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_shows_the_text_and_no_half_call_as_a_whole_one(protocol: str, model: ServedModel) -> None:
    kind = PROTOCOLS[protocol]
    for case in map(longest, tool_formats()):
        for events, stop in distinct(cuts_of(case)):
            is_cancelled = not events or not hasattr(events[-1], "finish_reason")
            streaming, whole = (writer_of(kind, model, stream=stream) for stream in (True, False))
            written = [data for _, data in streaming.begin()]
            list(whole.begin())
            for event in [*events, *([] if is_cancelled else [USAGE])]:
                written += [data for _, data in streaming.push(event)]
                list(whole.push(event))
            place = (case.format, case.name, stop, events)
            if is_cancelled:
                written += _without_error(streaming, kind)
                assert "".join(map(kind.text_of, written)) in (text_of(events), ""), place
                continue
            shown = kind.read(whole.body())
            assert shown.text == text_of(events), place
            if protocol != "tgi":  # whose stream has tokens
                assert "".join(map(kind.text_of, written)) == shown.text, place
            _check_end(protocol, shown, events, stop, place)


def _without_error(writer: AnswerWriter[Any, Any], kind: Protocol) -> list[dict[str, Any]]:
    """The events that end a cancelled stream, but for the error itself, which has no text."""
    events = list(writer.fail(ApiError(499, "the request was cancelled")))
    if isinstance(writer, ResponsesWriter):
        writer.cancel()
        assert kind.read(writer.body()).end == "cancelled"
        return [data for _, data in events]
    return []


def _check_end(protocol: str, shown: Shown, events: Sequence[Event], stop: str | None, place: object) -> None:
    """Calls are reported as made only if the arguments of the last one are whole."""
    arguments = arguments_of(events)
    is_whole = bool(arguments) and _is_object(arguments[-1])
    if protocol == "chat":
        assert shown.calls == arguments, place
        assert shown.end == ("length" if stop is None else "tool_calls" if is_whole else "stop"), place
    elif protocol == "anthropic":
        assert len(shown.calls) == len(arguments), place
        at_stop = ("tool_use", None) if is_whole else ("stop_sequence", stop)
        at_limit = ("max_tokens", None)
        assert shown.end == (at_limit if stop is None else at_stop), place
    elif protocol == "ollama":
        follows_text = is_text_last(events)
        assert len(shown.calls) == len(arguments) - (bool(arguments) and not is_whole and not follows_text), place
        assert shown.end == ("length" if stop is None else "stop"), place
    elif protocol == "responses":
        assert shown.calls == arguments, place
        assert shown.end == ("incomplete" if stop is None else "completed"), place


def is_text_last(events: Sequence[Event]) -> bool:
    """True if text follows the last call, which so is broken rather than cut."""
    kinds = [type(event) for event in events if getattr(event, "text", "") or isinstance(event, ToolCallDelta)]
    return bool(kinds) and kinds[-1] is not ToolCallDelta


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
