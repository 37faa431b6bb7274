"""What the server's process and the engine's say to each other: MessagePack, checked by type on arrival.

Only what is new travels. Outputs go as they are; msgspec encodes them without a Python object in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, get_type_hints

import msgspec

from octavo.core.client import ModelInfo
from octavo.engine.metrics import EngineMetrics
from octavo.errors import (
    EngineDeadError,
    GraphError,
    InsufficientMemoryError,
    ModelLoadError,
    NumericalError,
    OctavoError,
    OverloadedError,
    UsageError,
)
from octavo.generation_request import GenerationRequest, PoolingParams
from octavo.outputs import RequestOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams

T = TypeVar("T")

# Names of the sockets in the directory of a StartOrder. The server binds both.
TO_ENGINE = "to-engine"
FROM_ENGINE = "from-engine"

# Beyond any request that the server lets through, and any step. A longer one ends the connection.
MAX_MESSAGE_BYTES = 64 << 20

_ERROR_TYPES: dict[str, type[OctavoError]] = {
    kind.__name__: kind
    for kind in (
        *(EngineDeadError, GraphError, InsufficientMemoryError, ModelLoadError),
        *(NumericalError, OctavoError, OverloadedError, UsageError),
    )
}
_PARAMS_TYPES = {kind.__name__: kind for kind in (SamplingParams, BeamSearchParams, PoolingParams)}
_REQUEST_TYPES = get_type_hints(GenerationRequest)


class MalformedMessageError(Exception):
    """Bytes that are no message, or one of another type than the receiver takes. Never leaves this room."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    """A list of the type's name and the fields in their order."""


class Problem(msgspec.Struct, array_like=True):
    """An OctavoError. kind: the name of its class."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 1.0


# --- to the engine ---


class StartOrder(msgspec.Struct):
    """What the engine's process reads from its standard input, as one line of JSON, before anything else.

    directory: that of the sockets; the process removes it once both sides are connected. config: the fields of
    EngineConfig. spawned_at: seconds, time.monotonic, which all processes of a machine share.
    """

    directory: str
    parent_pid: int
    config: dict[str, Any]
    log_level: int
    spawned_at: float


class Hello(_Message):
    """The server has both connections."""


class Submit(_Message):
    """A `GenerationRequest` for the engine, for `decode_request` to check.

    kind: the class of its parameters. request: its fields; of the prompt's text only that there was one.
    """

    request_id: str
    kind: str
    request: Any


class Abort(_Message):
    request_id: str


class AskMetrics(_Message):
    question: int


class Close(_Message):
    """End."""


ToEngine: TypeAlias = "Hello | Submit | Abort | AskMetrics | Close"


# --- from the engine ---


class Loading(_Message):
    bytes_done: int
    bytes_total: int


class Ready(_Message):
    info: ModelInfo


class LoadFailed(_Message):
    """The process waits to be ended, so that this message is not lost with it."""

    problem: Problem


class Heartbeat(_Message):
    """The state a few times a second, from a thread that waits for nobody.

    stalled_s: how long requests have waited for a step. is_computing: the process used its time meanwhile.
    last_step_age_s: as in `EngineStatus`. num_malformed: messages dropped so far.
    """

    metrics: EngineMetrics
    stalled_s: float
    is_computing: bool
    last_step_age_s: float | None
    num_malformed: int


class Checked(_Message):
    """The engine has taken the request, or refused it."""

    request_id: str
    problem: Problem | None = None


class Step(_Message):
    """The news of all requests after one step, by request where they are no `RequestOutput`s.

    Of the outputs prompt and prompt_token_ids stay behind, and prompt_logprobs come with the first alone.
    vectors: of PoolingParams, float32 of this machine. failures: requests that ended without an answer.
    """

    outputs: list[RequestOutput]
    vectors: dict[str, bytes]
    failures: dict[str, Problem]


class Metrics(_Message):
    question: int
    values: EngineMetrics


class Log(_Message):
    """A line for the server's log. level: of the module `logging`."""

    level: int
    name: str
    text: str


FromEngine: TypeAlias = "Loading | Ready | LoadFailed | Heartbeat | Checked | Step | Metrics | Log"

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(Hello | Submit | Abort | AskMetrics | Close)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(
    Loading | Ready | LoadFailed | Heartbeat | Checked | Step | Metrics | Log
)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The bytes of a message whose values are of the declared types."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises MalformedMessageError."""
    return _decode(_to_engine, data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises MalformedMessageError."""
    return _decode(_from_engine, data)


def encode_request(request_id: str, request: GenerationRequest) -> bytes:
    """A `Submit` message. Raises UsageError for what cannot be said in one."""
    text = None if request.prompt is None else ""
    request = replace(request, prompt_token_ids=_plain_ids(request.prompt_token_ids), prompt=text)
    try:
        data = _encoder.encode(Submit(request_id, type(request.params).__name__, request))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"the request holds a value that cannot be sent: {error}", code="invalid_value") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise UsageError(f"the request takes {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return data


def decode_request(message: Submit) -> GenerationRequest:
    """The request, its parameters checked anew. Raises UsageError, or MalformedMessageError."""
    try:
        types = {**_REQUEST_TYPES, "params": _PARAMS_TYPES[message.kind]}
        return GenerationRequest(
            **{name: msgspec.convert(value, types[name]) for name, value in message.request.items()}
        )
    except (msgspec.ValidationError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error.__cause__, UsageError):  # of the parameters' own check
            raise error.__cause__ from None
        raise MalformedMessageError(str(error)) from None


def to_problem(error: Exception) -> Problem:
    """An error for the way; one that is not Octavo's own becomes an OctavoError with its type and text."""
    for kind in type(error).__mro__:
        if kind.__name__ in _ERROR_TYPES:
            return Problem(
                kind.__name__,
                str(error),
                getattr(error, "param", None),
                getattr(error, "code", None),
                getattr(error, "retry_after_s", 1.0),
            )
    return Problem("OctavoError", f"{type(error).__name__}: {error}")


def to_error(problem: Problem) -> OctavoError:
    """The error again."""
    kind = _ERROR_TYPES.get(problem.kind, OctavoError)
    if kind is UsageError:
        return UsageError(problem.message, param=problem.param, code=problem.code)
    if kind is OverloadedError:
        code = problem.code or "server_overloaded"
        return OverloadedError(problem.message, code=code, retry_after_s=problem.retry_after_s)
    return kind(problem.message)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedMessageError(str(error)) from None


def _plain_ids(token_ids: Sequence[int]) -> list[int]:
    """The ids as integers of Python. What the model makes of them is for the engine to say."""
    try:
        if bool in set(map(type, token_ids)):
            raise TypeError("a bool is no token id")
        return array("i", token_ids).tolist()
    except TypeError:
        raise UsageError("prompt token ids must be integers", param="prompt", code="invalid_type") from None
    except OverflowError:
        text = "the prompt holds a number beyond 32 bits, which is no token id of any model"
        raise UsageError(text, param="prompt", code="token_out_of_range") from None
