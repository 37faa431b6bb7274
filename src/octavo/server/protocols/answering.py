"""What the protocols beside OpenAI's chat have in common: one writer makes the stream, and the whole answer of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.errors import ApiError
from octavo.server.generation.events import Event, Usage
from octavo.server.generation.spec import Generation
from octavo.server.generation.streaming import ChunkStream
from octavo.server.http.access_log import AccessRecord, record_of
from octavo.server.http.disconnect import run_unless_gone
from octavo.server.http.sse import event, event_stream
from octavo.server.models.served_model import ServedModel
from octavo.server.state import state_of

JsonObject: TypeAlias = "dict[str, Any] | msgspec.Struct"
NamedEvent: TypeAlias = "tuple[str | None, JsonObject]"
"""The type of a server-sent event, None for the default, and its data."""


_encoder = msgspec.json.Encoder()


class AnswerWriter(Protocol):
    """One answer in a protocol's words. The stream is what `begin` and `push` yield; `body` is the same as a whole."""

    def begin(self) -> Iterator[NamedEvent]:
        """Before the first event of the generation."""

    def push(self, event: Event) -> Iterator[NamedEvent]:
        """For each event of the generation; the last one is its Usage."""

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        """In place of all further events."""

    def body(self) -> JsonObject:
        """The whole answer, after the last event."""


async def answer(
    request: Request,
    model_name: str | None,
    start: Callable[[ServedModel], Coroutine[Any, Any, tuple[Generation, AnswerWriter]]],
    *,
    stream: bool,
    last: bytes = b"",
) -> Response:
    """The response to a request that generates: server-sent events or one JSON object.

    start: begins the generation, on the model that the request names. Ends it when the client leaves. last: ends every
    stream, whatever happened before.
    """
    resources = AsyncExitStack()
    record = record_of(request)

    async def begin() -> tuple[Generation, AnswerWriter]:
        model = await resources.enter_async_context(state_of(request).models.use(model_name))
        record.model = model.name
        generation, writer = await start(model)
        resources.push_async_callback(generation.aclose)
        return generation, writer

    async def whole() -> JsonObject:
        generation, writer = await begin()
        for _ in writer.begin():
            pass
        async for item in generation:
            if isinstance(item, Usage):
                _record(record, item)
            for _ in writer.push(item):
                pass
        return writer.body()

    try:
        if not stream:
            body = await run_unless_gone(request, whole())
            return Response(_encoder.encode(body), media_type="application/json")
        generation, writer = await run_unless_gone(request, begin())
        held = resources.pop_all()
    finally:
        await resources.aclose()
    chunks = ChunkStream(_chunks(generation, writer, record), held)
    return event_stream(request, chunks, on_error=lambda error: b"".join(map(_encode, writer.fail(error))), last=last)


async def _chunks(generation: Generation, writer: AnswerWriter, record: AccessRecord) -> AsyncGenerator[bytes, None]:
    if first := b"".join(map(_encode, writer.begin())):
        yield first
    async for item in generation:
        if isinstance(item, Usage):
            _record(record, item)
        if chunk := b"".join(map(_encode, writer.push(item))):
            yield chunk


def _record(record: AccessRecord, usage: Usage) -> None:
    """For the line of the access log."""
    record.num_prompt_tokens = usage.num_prompt_tokens
    record.num_completion_tokens = usage.num_completion_tokens
    record.num_cached_tokens = usage.num_cached_tokens
    record.ttft_s = usage.metrics.time_to_first_token_s


def _encode(named: NamedEvent) -> bytes:
    name, data = named
    return event(_encoder.encode(data), name)


def tenant_of(request: Request) -> str:
    """Whose request this is, by its API key; see `Common.tenant`."""
    return str(getattr(request.state, "tenant", ""))
