"""What the server's process and the engine's say to each other: MessagePack, checked by type on arrival.

Only what is new travels. Outputs go as they are; msgspec encodes them without a Python object in between.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.core.client import GenerateRequest, ModelInfo
from octavo.engine.request_checks import check_cache_salt, check_priority
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
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics
from octavo.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

# Names of the sockets in the directory of a StartOrder. The server binds both.
TO_ENGINE = "to-engine"
FROM_ENGINE = "from-engine"

# Beyond any request that the server lets through, and any step. A longer one ends the connection.
MAX_MESSAGE_BYTES = 64 << 20

_ERRORS: tuple[type[OctavoError], ...] = (
    EngineDeadError,
    GraphError,
    InsufficientMemoryError,
    ModelLoadError,
    NumericalError,
    OctavoError,
    OverloadedError,
    UsageError,
)
_ERROR_TYPES = {kind.__name__: kind for kind in _ERRORS}


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


class Generate(_Message):
    """`GenerateRequest`. prompt_token_ids: int32 of this machine. params: those fields that differ from the defaults.

    is_text: the prompt was a text, which matters to the words of an error only.
    """

    request_id: str
    prompt_token_ids: bytes
    params: dict[str, Any]
    is_beam_search: bool = False
    is_text: bool = False
    priority: int = 0
    cache_salt: str = ""


class Embed(_Message):
    """A prompt to embed. prompt_token_ids: as in `Generate`."""

    request_id: str
    prompt_token_ids: bytes
    pooling: Literal["mean", "last"]


class Abort(_Message):
    request_id: str


class AskMetrics(_Message):
    question: int


class Close(_Message):
    """End."""


ToEngine: TypeAlias = "Hello | Generate | Embed | Abort | AskMetrics | Close"


# --- from the engine ---


class Started(_Message):
    """The process has both connections and begins to load."""

    pid: int


class Loading(_Message):
    bytes_done: int
    bytes_total: int


class Ready(_Message):
    info: ModelInfo


class LoadFailed(_Message):
    """The process waits to be ended, so that this message is not lost with it."""

    problem: Problem


class Heartbeat(_Message):
    """The state a few times a second, from a thread that waits for nobody. Fields as in `EngineStatus`.

    stalled_s: how long requests have waited for a step. is_computing: the process used its time meanwhile.
    num_malformed: messages dropped so far.
    """

    num_steps: int
    stalled_s: float
    is_computing: bool
    last_step_age_s: float | None
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    num_malformed: int


class Accepted(_Message):
    request_id: str


class Rejected(_Message):
    request_id: str
    problem: Problem


class News(msgspec.Struct, array_like=True, gc=False):
    """What is new of one request. metrics: only where they have changed. prompt_logprobs: with the first news only."""

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class Failure(msgspec.Struct, array_like=True):
    """A request that ended without an answer."""

    request_id: str
    problem: Problem


class Step(_Message):
    """The news of all requests after one step."""

    news: list[News]
    failures: list[Failure]


class Embedded(_Message):
    """The answer to an `Embed`. vector: float32 of this machine."""

    request_id: str
    vector: bytes = b""
    problem: Problem | None = None


class Metrics(_Message):
    question: int
    values: dict[str, Any]


class Log(_Message):
    """A line for the server's log. level: of the module `logging`."""

    level: int
    name: str
    text: str


FromEngine: TypeAlias = (
    "Started | Loading | Ready | LoadFailed | Heartbeat | Accepted | Rejected | Step | Embedded | Metrics | Log"
)

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(
    Hello | Generate | Embed | Abort | AskMetrics | Close
)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(
    Started | Loading | Ready | LoadFailed | Heartbeat | Accepted | Rejected | Step | Embedded | Metrics | Log
)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The bytes of a message whose values are of the declared types."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises MalformedMessageError."""
    try:
        return _to_engine.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedMessageError(str(error)) from None


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises MalformedMessageError."""
    try:
        return _from_engine.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedMessageError(str(error)) from None


def encode_request(request_id: str, request: GenerateRequest) -> bytes:
    """A `Generate` message. Raises UsageError for what cannot be said in one."""
    is_beam_search = isinstance(request.params, BeamSearchParams)
    message = Generate(
        request_id,
        _packed(request.prompt_token_ids),
        _fields(request.params),
        is_beam_search,
        request.prompt is not None,
        check_priority(request.priority),
        check_cache_salt(request.cache_salt),
    )
    try:
        data = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"the request holds a value that cannot be sent: {error}", code="invalid_value") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise UsageError(f"the request takes {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return data


def encode_prompt(request_id: str, prompt_token_ids: Sequence[int], pooling: Literal["mean", "last"]) -> bytes:
    """An `Embed` message. Raises UsageError for what is no list of token ids."""
    return _encoder.encode(Embed(request_id, _packed(prompt_token_ids), pooling))


def decode_prompt(message: Embed) -> list[int]:
    """The token ids. Raises MalformedMessageError."""
    return _unpacked(message.prompt_token_ids)


def decode_request(message: Generate) -> GenerateRequest:
    """The request, its parameters checked anew. Raises UsageError, or MalformedMessageError."""
    token_ids = _unpacked(message.prompt_token_ids)
    try:
        params = _params(message.params, message.is_beam_search)
    except OctavoError:
        raise
    except (TypeError, ValueError) as error:
        raise MalformedMessageError(str(error)) from None
    return GenerateRequest(
        prompt_token_ids=token_ids,
        params=params,
        prompt="" if message.is_text else None,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


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


def _packed(token_ids: Any) -> bytes:
    try:
        if bool in set(map(type, token_ids)):
            raise TypeError("a bool is no token id")
        return array("i", token_ids).tobytes()
    except TypeError:
        raise UsageError("prompt token ids must be integers", param="prompt", code="invalid_type") from None
    except OverflowError:
        text = "the prompt holds a number beyond 32 bits, which is no token id of any model"
        raise UsageError(text, param="prompt", code="token_out_of_range") from None


def _unpacked(data: bytes) -> list[int]:
    token_ids = array("i")
    try:
        token_ids.frombytes(data)
    except ValueError as error:
        raise MalformedMessageError(str(error)) from None
    return token_ids.tolist()


def _fields(params: SamplingParams | BeamSearchParams | StructuredOutputsParams) -> dict[str, Any]:
    """The fields that differ from their defaults. The output kind does not travel: it is always that of a stream."""
    changed = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default and field.name != "output_kind":
            changed[field.name] = _fields(value) if isinstance(value, StructuredOutputsParams) else value
    return changed


def _params(fields: dict[str, Any], is_beam_search: bool) -> SamplingParams | BeamSearchParams:
    if is_beam_search:
        return BeamSearchParams(**fields)
    structured = fields.get("structured_outputs")
    if structured is not None:
        fields = {**fields, "structured_outputs": StructuredOutputsParams(**structured)}
    return SamplingParams(**fields)
