"""The path from a request to its answer, shared by all protocols: one writer makes the stream and the whole answer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.generation_request import RequestOptions
from octavo.server.errors import ApiError
from octavo.server.generation.events import (
    ChoiceEnd,
    Event,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from octavo.server.generation.json_schema import BlocksLoopError
from octavo.server.generation.prompt import encode_conversation
from octavo.server.generation.running import Generation, start_generation
from octavo.server.generation.spec import ChatSpec, TextSpec
from octavo.server.http.access_log import AccessRecord, record_of
from octavo.server.http.long_answer import EVENTS, StreamFormat, run_unless_gone
from octavo.server.http.route_table import DEFAULT_DIALECT, Dialect
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.protocol_fields import AnsweredFields
from octavo.server.server_state import state_of

NamedEvent: TypeAlias = "tuple[str | None, dict[str, Any]]"
"""The type of an event, None for the default, and its data."""
B = TypeVar("B")
R = TypeVar("R")
S = TypeVar("S", bound="ChatSpec | TextSpec")

BlockDelta: TypeAlias = "TextDelta | ReasoningDelta | ToolCallDelta"

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
_NUM_SCHEMA_THREADS = 2
# Further checks wait for one of them.
_SCHEMA_CHECKS = ThreadPoolExecutor(_NUM_SCHEMA_THREADS, "octavo-schema")
_LOGGED: set[tuple[str | None, str]] = set()  # routes and fields of the tables of ignored fields: bounded


@dataclass(frozen=True, slots=True)
class Arrival:
    """time_s: that of the request, by the monotonic clock. load_s: its wait for the model to be loaded."""

    time_s: float
    load_s: float


@dataclass(eq=False)
class AnswerWriter(ABC, Generic[B, S]):
    """Writes one answer in the format of a protocol. `begin` and `push` yield the stream; `body` is the whole.

    dialect, error_event: the form of errors, and the name of their event. stream_format, last: the form of the stream,
    and the end of every stream, failed or not.
    """

    dialect: ClassVar[Dialect] = DEFAULT_DIALECT
    stream_format: ClassVar[StreamFormat] = EVENTS
    error_event: ClassVar[str | None] = None
    last: ClassVar[bytes] = b""

    request: B
    spec: S
    model: ServedModel
    generation: Generation
    arrival: Arrival

    def __post_init__(self) -> None:
        """The beginning of a subclass's own state."""

    @property
    def truncation(self) -> dict[str, int]:
        """The number of tokens cut off the prompts, if the request asked for truncation."""
        asked = self.spec.truncate_prompt_tokens is not None
        return {"truncated_tokens": self.generation.num_truncated_tokens} if asked else {}

    def begin(self) -> Iterator[NamedEvent]:
        """The events before the first token, which most protocols do not have."""
        return iter(())

    @abstractmethod
    def push(self, event: Event) -> Iterator[NamedEvent]:
        """The events for one event of the generation. The last one is its Usage."""

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        """The events that take the place of all further ones."""
        yield self.error_event, self.dialect.error_body(error, self.generation.request_id)

    @abstractmethod
    def body(self) -> Any:
        """The whole answer, after the last event: an object, or a list of them."""


class BlockWriter(AnswerWriter[B, ChatSpec]):
    """Writes blocks of text, of reasoning and of single calls. One block at a time is open; the next one closes it."""

    _block: tuple[type, int] | None = None  # the kind of the last block, and the index of its call
    _end: ChoiceEnd | None = None

    @abstractmethod
    def begin_block(self, event: BlockDelta) -> Iterator[NamedEvent]:
        """The beginning of the block of this event, which itself is not part of it yet."""

    @abstractmethod
    def add(self, event: BlockDelta) -> Iterator[NamedEvent]:
        """Add the event to the open block."""

    @abstractmethod
    def end_block(self) -> Iterator[NamedEvent]:
        """The end of the open block, if there is one."""

    @abstractmethod
    def finish(self, end: ChoiceEnd, usage: Usage) -> Iterator[NamedEvent]:
        """The end of the answer, and of the block that may be open."""

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if isinstance(event, Usage):
            assert self._end is not None
            yield from self.finish(self._end, event)
        elif isinstance(event, ChoiceEnd):
            self._end = event
        elif not isinstance(event, PromptProgress):
            block = (type(event), event.call_index if isinstance(event, ToolCallDelta) else 0)
            # The end of text is a token without text.
            if block != self._block and (isinstance(event, ToolCallDelta) or event.text):
                yield from self.end_block()
                yield from self.begin_block(event)
                self._block = block
            if block == self._block:
                yield from self.add(event)


async def answer(
    request: Request,
    body: AnsweredFields,
    writer_class: Callable[[Any, Any, ServedModel, Generation, Arrival], AnswerWriter[Any, Any]],
    at_end: Callable[[], object] | None = None,
) -> Response:
    """The response to a request that generates: a stream or one JSON object.

    at_end: called when the answer is over or has failed. The generation ends when the client leaves. Raises UsageError
    for what cannot be honoured.
    """
    state, record, resources = state_of(request), record_of(request), AsyncExitStack()
    if at_end is not None:
        resources.callback(at_end)

    async def begin() -> AnswerWriter[Any, Any]:
        spec = await read_spec(request, lambda: body.to_spec(tenant_of(request)))
        began_s = time.monotonic()
        model = await resources.enter_async_context(state.models.use(body.model))
        if (scales := body.adapter_scales) is not None:
            model = replace(model, adapter=state.models.adapters.numbered(scales, "lora"))
        if spec.options.adapter and (own := state.models.adapters.find(spec.options.adapter)) is not None:
            model = replace(model, adapter=own)  # the engine refuses names that nobody knows
        arrival = Arrival(record.began_s, time.monotonic() - began_s)
        record.model, record.is_chat = model.name, isinstance(spec, ChatSpec)
        options = spec.options
        if options.closed_objects is None:
            options = replace(options, closed_objects=state.config.closed_objects)
        params = spec.params.with_defaults(model.info.sampling_defaults.without(spec.given))
        filled = replace(spec, params=params, options=with_batch_priority(options, record))
        is_batch = record.batch_priority is not None
        generation = await start_generation(state, model, filled, record.request_id, is_batch=is_batch)
        resources.push_async_callback(generation.aclose)
        return writer_class(body, filled, model, generation, arrival)

    async def whole() -> AnswerWriter[Any, Any]:
        writer = await begin()
        async for _ in _stream(writer, record, _discard):
            pass
        return writer

    try:
        if not body.stream:
            writer = await run_unless_gone(request, whole())
            response = Response(_encoder.encode(writer.body()), media_type="application/json")
            return name_ignored(ignored_names(body, writer.generation), record, response)
        writer = await run_unless_gone(request, begin())
        held = resources.pop_all()
    finally:
        await resources.aclose()
    form = writer.stream_format

    def encode(events: Iterator[NamedEvent]) -> bytes:
        return b"".join(form.encode(_encoder.encode(data), name) for name, data in events)

    chunks = _stream(writer, record, encode)
    stream = form.response(
        request, chunks, on_error=lambda error: encode(writer.fail(error)), last=writer.last, held=held
    )
    return name_ignored(ignored_names(body, writer.generation), record, stream)


class InputTokens(BaseModel):
    """The size of a prompt, as OpenAI and llama.cpp show it."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class CountedFields(Protocol):
    """The body of a request that is a conversation. model: None is the default."""

    model: str | None

    def to_spec(self, tenant: str) -> ChatSpec:
        """The request to a model."""


async def count_prompt_tokens(request: Request, body: CountedFields) -> int:
    """The number of tokens in the prompt of a conversation, which may exceed the context. Raises UsageError for what
    cannot be honoured."""
    spec = await run_unless_gone(request, read_spec(request, lambda: body.to_spec(tenant_of(request))))
    async with state_of(request).models.use(body.model) as model:
        return len(await run_unless_gone(request, encode_conversation(model, spec)))


def ignored_names(body: AnsweredFields, generation: Generation) -> list[str]:
    """The names of the fields that have no effect, on any model or on this one."""
    names = (body.own_names.get(name, name) for name in generation.ignored_fields)
    return list(dict.fromkeys([*body.find_ignored(), *names]))


def with_batch_priority(options: RequestOptions, record: AccessRecord) -> RequestOptions:
    """The options of a request, with the priority of its batch if it is a line of one."""
    return options if record.batch_priority is None else replace(options, priority=record.batch_priority)


async def read_spec(request: Request, read: Callable[[], R]) -> R:
    """The result of `read`, such as a body's `to_spec`. Large bodies, and JSON schemas, whose check may take seconds,
    are read on another thread, so that nobody's stream waits for it. Raises UsageError for what cannot be honoured."""
    try:
        return await off_loop(request, read)
    except BlocksLoopError:
        return await asyncio.get_running_loop().run_in_executor(_SCHEMA_CHECKS, read)


async def off_loop(request: Request, work: Callable[[], R]) -> R:
    """The result of `work`, whose time grows with the body: of a large one from another thread."""
    if request.scope["state"].get("has_large_body"):
        return await asyncio.get_running_loop().run_in_executor(_SCHEMA_CHECKS, work)
    return work()


def start_schema_threads() -> None:
    """Start the threads that check schemas. Later there may be no memory for them, and their start would hang."""
    together = threading.Barrier(_NUM_SCHEMA_THREADS + 1)
    for _ in range(_NUM_SCHEMA_THREADS):
        _SCHEMA_CHECKS.submit(together.wait)
    together.wait()


def name_ignored(ignored: Sequence[str], record: AccessRecord, response: Response) -> Response:
    """The response with the names of the fields that had no effect; each is logged once for a route."""
    if ignored:
        response.headers["x-octavo-ignored-fields"] = ", ".join(ignored)
    for name in ignored:
        if (record.route, name) not in _LOGGED:
            _LOGGED.add((record.route, name))
            logger.info("%s: the field %s is accepted and has no effect", record.route, name)
    return response


async def _stream(
    writer: AnswerWriter[Any, Any], record: AccessRecord, encode: Callable[[Iterator[NamedEvent]], bytes]
) -> AsyncGenerator[bytes, None]:
    """The events of the answer, each step of the generation as one chunk."""
    if chunk := encode(writer.begin()):
        yield chunk
    async for event in writer.generation:
        if isinstance(event, Usage):
            record.num_prompt_tokens = event.num_prompt_tokens
            record.num_completion_tokens = event.num_completion_tokens
            record.num_cached_tokens = event.num_cached_tokens
            record.ttft_s = event.metrics.time_to_first_token_s
        if chunk := encode(writer.push(event)):
            yield chunk


def _discard(events: Iterator[NamedEvent]) -> bytes:
    deque(events, maxlen=0)
    return b""


def tenant_of(request: Request) -> str:
    """The owner of this request, by its API key; see `Common.tenant`."""
    return str(getattr(request.state, "tenant", ""))
