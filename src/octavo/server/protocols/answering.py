"""The steps from a request to its answer, shared by all protocols. The same writer makes streams and whole answers."""

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
"""(type of the event, its data). None means the default type."""
B = TypeVar("B")
R = TypeVar("R")
S = TypeVar("S", bound="ChatSpec | TextSpec")

BlockDelta: TypeAlias = "TextDelta | ReasoningDelta | ToolCallDelta"

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
_NUM_SCHEMA_THREADS = 2
# Maximum number of schema checks at a time. Further checks wait.
_SCHEMA_CHECKS = ThreadPoolExecutor(_NUM_SCHEMA_THREADS, "octavo-schema")
_LOGGED: set[tuple[str | None, str]] = set()  # (route, ignored field): bounded


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request arrived, and how long it waited for its model.

    time_s: time of arrival by the monotonic clock
    load_s: time that it waited for the model to be loaded
    """

    time_s: float
    load_s: float


@dataclass(eq=False)
class AnswerWriter(ABC, Generic[B, S]):
    """Writes one answer in the format of a protocol. `begin` and `push` yield the stream; `body` returns the whole
    answer.

    dialect, error_event: the error format, and the name of error events
    stream_format, last: the stream format, and the end of every stream, failed or not
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
        """Initialize a subclass's own state."""

    @property
    def truncation(self) -> dict[str, int]:
        """The member with the number of tokens cut off the prompts, or an empty dict if the request did not ask for
        truncation.
        """
        asked = self.spec.truncate_prompt_tokens is not None
        return {"truncated_tokens": self.generation.num_truncated_tokens} if asked else {}

    def begin(self) -> Iterator[NamedEvent]:
        """Yield the events before the first token. Most protocols have none."""
        return iter(())

    @abstractmethod
    def push(self, event: Event) -> Iterator[NamedEvent]:
        """Yield the protocol's events for one event of the generation. The generation's last event is its Usage."""

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        """Yield the events that end a failed stream."""
        yield self.error_event, self.dialect.error_body(error, self.generation.request_id)

    @abstractmethod
    def body(self) -> Any:
        """Return the whole answer, an object or a list of objects. Call this after the last event."""


class BlockWriter(AnswerWriter[B, ChatSpec]):
    """Writes blocks, each with text, reasoning or a single call. Only one block is open at a time; the next one closes
    it.
    """

    _block: tuple[type, int] | None = None  # the kind of the last block, and the index of its call
    _end: ChoiceEnd | None = None

    @abstractmethod
    def begin_block(self, event: BlockDelta) -> Iterator[NamedEvent]:
        """Begin the block that this event belongs to, without adding the event yet."""

    @abstractmethod
    def add(self, event: BlockDelta) -> Iterator[NamedEvent]:
        """Add the event to the open block."""

    @abstractmethod
    def end_block(self) -> Iterator[NamedEvent]:
        """End the open block, if there is one."""

    @abstractmethod
    def finish(self, end: ChoiceEnd, usage: Usage) -> Iterator[NamedEvent]:
        """End the answer, and the open block if there is one."""

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
    """Answer a generation request with a stream or one JSON object. The generation ends when the client disconnects.
    Raises UsageError for fields that cannot be honoured.

    at_end: called when the answer is complete or has failed
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
            model = replace(model, adapter=own)  # the engine refuses names that it does not know
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
    """The number of tokens in a prompt, in OpenAI's and llama.cpp's form."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class CountedFields(Protocol):
    """The body of a request that contains a conversation.

    model: None means the default model
    """

    model: str | None

    def to_spec(self, tenant: str) -> ChatSpec:
        """Convert the body to a model-independent request."""


async def count_prompt_tokens(request: Request, body: CountedFields) -> int:
    """Return the number of tokens in a conversation's prompt, which may exceed the context.

    Raises UsageError for fields that cannot be honoured.
    """
    spec = await run_unless_gone(request, read_spec(request, lambda: body.to_spec(tenant_of(request))))
    async with state_of(request).models.use(body.model) as model:
        return len(await run_unless_gone(request, encode_conversation(model, spec)))


def ignored_names(body: AnsweredFields, generation: Generation) -> list[str]:
    """Return the names of the fields that have no effect, on any model or only on this one."""
    names = (body.own_names.get(name, name) for name in generation.ignored_fields)
    return list(dict.fromkeys([*body.find_ignored(), *names]))


def with_batch_priority(options: RequestOptions, record: AccessRecord) -> RequestOptions:
    """Return the request's options. If the request is a line of a batch, it gets the batch's priority."""
    return options if record.batch_priority is None else replace(options, priority=record.batch_priority)


async def read_spec(request: Request, read: Callable[[], R]) -> R:
    """Return the result of `read`, such as a body's `to_spec`.

    Large bodies and JSON schemas, whose check may take seconds, are read on another thread, so that no stream has to
    wait. Raises UsageError for fields that cannot be honoured.
    """
    try:
        return await off_loop(request, read)
    except BlocksLoopError:
        return await asyncio.get_running_loop().run_in_executor(_SCHEMA_CHECKS, read)


async def off_loop(request: Request, work: Callable[[], R]) -> R:
    """Return the result of `work`, whose time grows with the body. For a large body it runs on another thread."""
    if request.scope["state"].get("has_large_body"):
        return await asyncio.get_running_loop().run_in_executor(_SCHEMA_CHECKS, work)
    return work()


def start_schema_threads() -> None:
    """Start the threads that check schemas. Later there may not be enough memory to start them, and the server would
    hang.
    """
    together = threading.Barrier(_NUM_SCHEMA_THREADS + 1)
    for _ in range(_NUM_SCHEMA_THREADS):
        _SCHEMA_CHECKS.submit(together.wait)
    together.wait()


def name_ignored(ignored: Sequence[str], record: AccessRecord, response: Response) -> Response:
    """Add the names of the fields without effect to the response. Each name is logged once per route."""
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
    """Yield the answer's events, with each step of the generation as one chunk."""
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
    """Return the owner of this request, identified by its API key; see `Common.tenant`."""
    return str(getattr(request.state, "tenant", ""))
