"""The messages between the server's process and the engine's: MessagePack, checked by type on arrival.

They carry only new data. msgspec encodes outputs directly, without intermediate Python objects.
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
    """Bytes that are not a message, or a message of the wrong type for the receiver. It never leaves this package."""


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
    """The first line on the standard input of the engine's process, as JSON.

    directory: the directory of the sockets; the process removes it once both sides are connected. config: the fields of
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
    """A `GenerationRequest` for the engine; `decode_request` checks it.

    kind: the class of its parameters. request: its fields, without the prompt's text.
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
    """Loading failed. The process waits to be killed, so that this message is not lost."""

    problem: Problem


class Heartbeat(_Message):
    """The state of the process, sent a few times a second by a thread that never blocks.

    stalled_s: seconds that requests have waited for a step. is_computing: the process has used processor time.
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
    """The new outputs of all requests after one step; those that are not `RequestOutput`s are by request.

    The outputs have no prompt and prompt_token_ids, and only the first has prompt_logprobs. vectors: those of
    PoolingParams, in the machine's float32. failures: requests that ended without an answer.
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
    """A `Submit` message. Raises UsageError for values that it cannot represent."""
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
    """The request, with its parameters checked again. Raises UsageError or MalformedMessageError."""
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
    """An error in the form of a message; one that is not Octavo's own becomes an OctavoError with its type and text."""
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
    """The error of a message."""
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
    """The ids as Python integers. The engine checks their values."""
    try:
        if bool in set(map(type, token_ids)):
            raise TypeError("a bool is not a token id")
        return array("i", token_ids).tolist()
    except TypeError:
        raise UsageError("prompt token ids must be integers", param="prompt", code="invalid_type") from None
    except OverflowError:
        text = "the prompt holds a number beyond 32 bits, which is not a token id of any model"
        raise UsageError(text, param="prompt", code="token_out_of_range") from None
