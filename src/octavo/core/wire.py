"""The messages between the server and the engine: MessagePack, with types checked on arrival.

They carry only new data. msgspec encodes outputs directly, without intermediate Python objects. On the connection, the
size of each message precedes it in four bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias, get_type_hints

import msgspec
import numpy as np

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine.client import ModelInfo
from octavo.engine.metrics import EngineMetrics
from octavo.engine.slots import SlotAction, SlotReport
from octavo.errors import OctavoError, OverloadedError, UsageError
from octavo.generation_request import GenerationRequest, PoolingParams
from octavo.image_layout import ImageLayout
from octavo.outputs import OutputDelta
from octavo.prompt import MediaItem, Prompt, Span
from octavo.sampling_params import BeamSearchParams, SamplingParams

# Beyond any request that the server lets through, and any step. A longer one ends the connection.
MAX_MESSAGE_BYTES = 64 << 20
SIZE_BYTES = 4  # before each message

_ERROR_TYPES = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OctavoError)
}
_PARAMS_TYPES = {kind.__name__: kind for kind in (SamplingParams, BeamSearchParams, PoolingParams)}
_REQUEST_TYPES = {name: kind for name, kind in get_type_hints(GenerationRequest).items() if name != "prompt"}


class MalformedMessageError(Exception):
    """Raised for bytes that are not a message. It never leaves this package."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    """A message, encoded as a list of its type's name and its fields in order."""


class Problem(msgspec.Struct, array_like=True):
    """An OctavoError as a message.

    kind: the name of its class.
    """

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 1.0


# --- to the engine ---


class Start(_Message):
    """The first message, which starts the engine.

    spawned_at: seconds of `time.monotonic`, a clock shared by all processes on a machine.
    """

    config: EngineConfig
    log_level: int
    spawned_at: float


class SentSpan(msgspec.Struct, array_like=True):
    """A `Span` as part of a message.

    values: in the machine's float32, [length, width].
    """

    start: int
    length: int
    key: bytes
    width: int
    values: memoryview | None
    item: int  # index among the prompt's items; -1 if none
    offset: int


class SentItem(msgspec.Struct, array_like=True):
    """A `MediaItem` as part of a message.

    tiles: the bytes of each tile. Its layout and `sides` give the height and width.
    """

    key: bytes
    layout: ImageLayout
    sides: tuple[tuple[int, int], ...]
    tiles: tuple[memoryview, ...]


class SentPrompt(msgspec.Struct, array_like=True):
    """A `Prompt` as part of a message."""

    token_ids: tuple[int, ...]
    spans: tuple[SentSpan, ...]
    items: tuple[SentItem, ...]


class Submit(_Message):
    """A `GenerationRequest` for the engine; `decode_request` checks it.

    kind: the class of its parameters.
    request: the request's other fields, without the prompt's text.
    """

    request_id: str
    kind: str
    prompt: SentPrompt
    request: Any


class Abort(_Message):
    request_id: str


class AskMetrics(_Message):
    question_id: str


class Sleep(_Message):
    """Release the device's memory, or allocate it again. A `Reply` reports when that is done."""

    question_id: str
    is_over: bool


class ActOnSlot(_Message):
    """Save, restore or erase a slot's content. A `Reply` reports when that is done."""

    question_id: str
    action: SlotAction


class Adapt(_Message):
    """Load an adapter under this name, or forget it if the path is empty. A `Reply` reports when that is done."""

    question_id: str
    name: str
    path: str
    scale: float


# --- from the engine ---


class Loading(_Message):
    phase: str
    bytes_done: int
    bytes_total: int


class Ready(_Message):
    info: ModelInfo


class Failed(_Message):
    """The model cannot be loaded, or the engine cannot continue. The engine ends the connection after this message."""

    problem: Problem


class Heartbeat(_Message):
    """The state of the engine, sent a few times a second by a dedicated thread.

    stalled_s: from `Session.measure_stall`.
    is_computing: True if the process has used processor time.
    last_step_age_s: as in `EngineStatus`.
    """

    metrics: EngineMetrics
    stalled_s: float
    is_computing: bool
    last_step_age_s: float | None


class Reply(_Message):
    """The outcome of the request, sleep, adapter or slot action with this id: accepted, refused, or with results."""

    question_id: str
    problem: Problem | None = None
    metrics: EngineMetrics | None = None
    slot: SlotReport | None = None


class Step(_Message):
    """The new outputs of all requests after one step. Outputs other than `OutputDelta` are keyed by request.

    vectors: results for PoolingParams, in the machine's float32.
    failures: requests that ended without an answer.
    """

    outputs: list[OutputDelta]
    vectors: dict[str, bytes]
    failures: dict[str, Problem]


class Log(_Message):
    """A line for the server's log.

    level: a level of the module `logging`.
    """

    level: int
    name: str
    text: str


EngineMessage: TypeAlias = (
    Start
    | Submit
    | Abort
    | AskMetrics
    | Sleep
    | ActOnSlot
    | Adapt
    | Loading
    | Ready
    | Failed
    | Heartbeat
    | Reply
    | Step
    | Log
)


def _plain(value: object) -> int:
    """Convert instances of number subclasses, such as the default length of an answer, to plain numbers."""
    if isinstance(value, int):
        return int(value)
    raise NotImplementedError(f"a value of {type(value).__name__} cannot be sent")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def decode(data: bytes) -> EngineMessage:
    """Decode a message. Raises MalformedMessageError."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedMessageError(str(error)) from None


def frame(data: bytes) -> bytes:
    """Return an encoded message preceded by its size."""
    return len(data).to_bytes(SIZE_BYTES, "big") + data


def frame_size(head: bytes) -> int:
    """Return the size of the message that follows. Raises MalformedMessageError beyond MAX_MESSAGE_BYTES."""
    size = int.from_bytes(head, "big")
    if size > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"a message has {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return size


def encode_request(request_id: str, request: GenerationRequest) -> bytes:
    """Encode a `Submit` message. Raises UsageError for values that it cannot represent."""
    fields = {name: getattr(request, name) for name in _REQUEST_TYPES}
    fields["text"] = None if request.text is None else ""
    try:
        data = encode(Submit(request_id, type(request.params).__name__, _sent(request.prompt), fields))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"the request holds a value that cannot be sent: {error}", code="invalid_value") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise UsageError(f"the request takes {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return data


def decode_request(message: Submit) -> GenerationRequest:
    """Return the request after checking its prompt and parameters again. Raises UsageError or MalformedMessageError."""
    try:
        types = {**_REQUEST_TYPES, "params": _PARAMS_TYPES[message.kind]}
        fields = {name: msgspec.convert(value, types[name]) for name, value in message.request.items()}
        return GenerationRequest(prompt=_received(message.prompt), **fields)
    except (msgspec.ValidationError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error.__cause__, UsageError):  # raised by the parameters' own check
            raise error.__cause__ from None
        raise MalformedMessageError(str(error)) from None


def to_problem(error: Exception) -> Problem:
    """Convert an error to a message.

    An error that is not Octavo's own becomes an OctavoError with its type and text.
    """
    for kind in type(error).__mro__:
        if kind.__name__ in _ERROR_TYPES:
            fields = {name: value for name, value in vars(error).items() if name in Problem.__struct_fields__}
            return Problem(kind.__name__, str(error), **fields)
    return Problem("OctavoError", f"{type(error).__name__}: {error}")


def to_error(problem: Problem) -> OctavoError:
    """Convert a message back to an error."""
    kind = _ERROR_TYPES.get(problem.kind, OctavoError)
    if kind is UsageError:
        return UsageError(problem.message, param=problem.param, code=problem.code)
    if kind is OverloadedError:
        code = problem.code or "server_overloaded"
        return OverloadedError(problem.message, code=code, retry_after_s=problem.retry_after_s)
    return kind(problem.message)


def _sent(prompt: Prompt) -> SentPrompt:
    items, spans = prompt.items, []
    numbers = {id(item): number for number, item in enumerate(items)}
    for span in prompt.spans:
        width, values = (0, None) if span.values is None else (span.values.shape[1], span.values.data.cast("B"))
        item = -1 if span.item is None else numbers[id(span.item)]
        spans.append(SentSpan(span.start, span.length, span.key, width, values, item, span.offset))
    return SentPrompt(prompt.token_ids, tuple(spans), tuple(map(_sent_item, items)))


def _sent_item(item: MediaItem) -> SentItem:
    tiles = [np.ascontiguousarray(tile) for tile in item.tiles]
    sides = tuple((int(tile.shape[0]), int(tile.shape[1])) for tile in tiles)
    return SentItem(item.key, item.layout, sides, tuple(tile.data.cast("B") for tile in tiles))


def _received_item(item: SentItem) -> MediaItem:
    tiles = []
    if len(item.sides) != len(item.tiles):
        raise MalformedMessageError(f"an item has {len(item.sides)} sizes for {len(item.tiles)} tiles")
    for (height, width), data in zip(item.sides, item.tiles, strict=True):
        if min(height, width) < 1 or len(data) != 3 * height * width:
            raise MalformedMessageError(f"a tile is {len(data)} bytes for {height} x {width} pixels")
        tiles.append(np.frombuffer(data, np.uint8).reshape(height, width, 3))
    return MediaItem(item.key, item.layout, tuple(tiles))


def _received(prompt: SentPrompt) -> Prompt:
    spans, items = [], [_received_item(item) for item in prompt.items]
    for span in prompt.spans:
        values = None
        if span.values is not None:
            if min(span.length, span.width) < 1 or len(span.values) != 4 * span.length * span.width:
                size = f"{len(span.values)} bytes for [{span.length}, {span.width}] numbers"
                raise MalformedMessageError(f"the values of a span are {size}")
            values = np.frombuffer(span.values, np.float32).reshape(span.length, span.width)
        if not -1 <= span.item < len(items):
            raise MalformedMessageError(f"a span is of item {span.item} of {len(items)}")
        item = None if span.item < 0 else items[span.item]
        spans.append(Span(span.start, span.length, span.key, values, item, span.offset))
    return Prompt(prompt.token_ids, spans)
