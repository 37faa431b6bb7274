"""The messages between the ranks of an engine: MessagePack, with type, shape and size checked on arrival."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from hashlib import sha256
from math import prod
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo import __version__
from octavo.backends.moved_blocks import moves
from octavo.batch import SAMPLING_ROW, Batch, BlockBytes, DomainRows, SamplingBatch
from octavo.config import EngineConfig

PROTOCOL = 13
SIZE_BYTES = 8  # before each message
MAX_MESSAGE_BYTES = 4 << 30
_TYPES = {name: np.dtype(name) for name in ("int32", "float32", "uint32", "uint8")}
_BATCH = (
    "token_ids",
    "positions",
    "query_start_loc",
    "seq_lens",
    "block_tables",
    "slot_mapping",
    "logits_indices",
    "hidden_indices",
    "block_copies",
    "state_copies",
)
_OPTIONAL = ("state_slots", "state_saves", "token_types")
_SAMPLING = ("history_start", "history_ids", "history_counts", "bias_start", "bias_ids", "bias_values")


class MalformedRankMessageError(Exception):
    """Raised for bytes that are not a message. Never leaves this package."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    """A message, encoded as a list of its type's name and its fields in order."""


class Tensor(msgspec.Struct, array_like=True):
    """An array as the name of its type, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray  # writable, as steps ask for it

    @classmethod
    def of(cls, array: NDArray[Any]) -> Tensor:
        return cls(array.dtype.name, array.shape, bytearray(array.tobytes()))

    def array(self) -> NDArray[Any]:
        """Return the array. Raises MalformedRankMessageError unless the number of bytes matches the shape."""
        dtype = _TYPES.get(self.dtype)
        if dtype is None or any(n < 0 for n in self.shape) or prod(self.shape) * dtype.itemsize != len(self.data):
            raise MalformedRankMessageError(f"{len(self.data)} bytes do not make {self.dtype} of shape {self.shape}")
        return np.frombuffer(self.data, dtype).reshape(self.shape)

    def array_of(self, dtype: type[np.generic], ndim: int) -> NDArray[Any]:
        """Return the array if it has this type and `ndim` dimensions. Raises MalformedRankMessageError otherwise."""
        array = self.array()
        if array.dtype != dtype or array.ndim != ndim:
            raise MalformedRankMessageError(
                f"{array.dtype} of shape {array.shape} is not {np.dtype(dtype)} with {ndim} dimensions"
            )
        return array


class Challenge(_Message):
    """The leader's first message over the network: random bytes with which a rank proves that it knows the token."""

    nonce: bytes


class Hello(_Message):
    """The first message of a rank that connects over the network.

    proof: shows that the rank knows the token, given the leader's challenge.
    """

    version: str
    protocol: int
    rank: int
    proof: bytes


class Setup(_Message):
    """The part of a model that a rank must load.

    group: the name of its stage's group.
    model_len: tokens of the longest request.
    max_num_outputs: maximum number of output rows per step, higher if a draft head reads the hidden states of all
    tokens.
    taps: the layers whose inputs the draft head reads.
    digest: the model's digest, for a rank on another machine; empty if the rank opens the same file.
    """

    config: EngineConfig
    rank: int
    group: str
    model_len: int
    max_num_outputs: int
    taps: tuple[int, ...] = ()
    digest: str = ""


class Joining(_Message):
    """A rank knows its part of the model.

    Once all ranks have sent this message, the leader answers with the same message, and they join their groups.
    """


class Loaded(_Message):
    """The sizes of a loaded rank, in bytes.

    block_token_bytes: cache bytes per token in a block.
    token_bytes: cache bytes per token in all layers.
    state_bytes: bytes of a state.
    available_bytes: the free memory left to the rank, on its GPU or as its share of its machine's memory.
    """

    block_token_bytes: int
    token_bytes: int
    state_bytes: int
    weight_bytes: int
    available_bytes: int


class Allocate(_Message):
    """The sizes of the cache that every rank must allocate."""

    num_blocks: int
    block_size: int
    num_states: int


class Allocated(_Message):
    """A rank has allocated its cache."""


class DomainTensors(msgspec.Struct, array_like=True):
    """The rows of a domain in a step: the fields of `octavo.batch.DomainRows`."""

    count: int
    starts: Tensor | None
    positions: Tensor | None
    indices: dict[str, Tensor]
    lengths: Tensor | None = None
    slots: Tensor | None = None

    @classmethod
    def of(cls, rows: DomainRows) -> DomainTensors:
        arrays = (rows.starts, rows.positions, rows.lengths, rows.slots)
        starts, positions, lengths, slots = (None if each is None else Tensor.of(each) for each in arrays)
        indices = {name: Tensor.of(array) for name, array in rows.indices.items()}
        return cls(rows.count, starts, positions, indices, lengths, slots)

    def rows(self) -> DomainRows:
        """Return the rows, whose values the executor checks. Raises MalformedRankMessageError for a wrong count, and
        for arrays of the wrong type or number of dimensions.
        """
        if not 0 <= self.count < 2**31:
            raise MalformedRankMessageError(f"a domain cannot have {self.count} rows")
        tensors = ((self.starts, 1), (self.positions, 2), (self.lengths, 1), (self.slots, 2))
        starts, positions, lengths, slots = (
            None if tensor is None else tensor.array_of(np.int32, ndim) for tensor, ndim in tensors
        )
        indices = {name: tensor.array_of(np.int32, 1) for name, tensor in self.indices.items()}
        return DomainRows(self.count, starts, positions, indices, lengths, slots)


class RunStep(_Message):
    """A step: its number, which increases by one, and the arrays of its batch.

    sampling: the rows as bytes and the other arrays of the options, for ranks that sample together.
    moved: the blocks to save, the blocks to load, and the rank's part of their bytes; then the same for state slots.
    Empty if nothing is moved.
    inputs: values for the first stage; other stages receive their inputs as `StageValues`.
    """

    number: int
    arrays: list[Tensor]
    optional: list[Tensor | None]
    sampling: list[Tensor] = []
    moved: list[Tensor] = []
    inputs: list[Tensor] = []
    domains: dict[str, DomainTensors] = {}


class AdapterPart(_Message):
    """One `LowRank` of an adapter.

    adapter: the leader's number for the adapter.
    """

    adapter: int
    name: str
    a: Tensor | None
    b: Tensor
    scale: float
    gain: Tensor | None = None


class HoldAdapter(_Message):
    """All parts of an adapter have been sent."""

    adapter: int


class LoadAdapter(_Message):
    """Steps after this message read the adapter from this slot."""

    adapter: int
    slot: int


class DropAdapter(_Message):
    """No later step will use this adapter."""

    adapter: int


class SavedBlocks(_Message):
    """A rank's part of the blocks and states that a step has saved. Precedes the values of the step."""

    number: int
    blocks: Tensor
    states: Tensor


class StageValues(_Message):
    """The values that the previous stage computed in a step: the inputs of this one."""

    number: int
    arrays: list[Tensor]


class Alive(_Message):
    """A keep-alive message.

    progress: a number that changes as long as a step makes progress.
    is_busy: the rank is computing and not waiting for another rank.
    waited_s: seconds since its start for which one of its threads had to wait for a disk or a processor.
    """

    progress: int = 0
    is_busy: bool = False
    waited_s: float = 0.0


class RankFailed(_Message):
    """A rank cannot continue, for the given reason.

    kind: the name of an OctavoError class.
    """

    kind: str
    reason: str


RankMessage: TypeAlias = (
    Challenge
    | Hello
    | Setup
    | Joining
    | Loaded
    | Allocate
    | Allocated
    | RunStep
    | AdapterPart
    | HoldAdapter
    | LoadAdapter
    | DropAdapter
    | SavedBlocks
    | StageValues
    | Alive
    | RankFailed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


def encode(message: RankMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> RankMessage:
    """Decode a message. Raises MalformedRankMessageError for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise MalformedRankMessageError(str(error)) from None


def step_message(number: int, batch: Batch, *, with_sampling: bool = False) -> RunStep:
    """Return the message with the parts of a batch that are needed by ranks that do not sample.

    with_sampling: add the sampling options, for ranks that sample together with the sender.
    """
    optional = [getattr(batch, name) for name in _OPTIONAL]
    return RunStep(
        number,
        [Tensor.of(getattr(batch, name)) for name in _BATCH],
        [None if array is None else Tensor.of(array) for array in optional],
        _sampling_tensors(batch.sampling) if with_sampling and batch.sampling is not None else [],
        inputs=[Tensor.of(array) for array in batch.inputs],
        domains={name: DomainTensors.of(rows) for name, rows in batch.domains.items()},
    )


def _sampling_tensors(sampling: SamplingBatch) -> list[Tensor]:
    rows = np.ascontiguousarray(sampling.rows)
    arrays: list[NDArray[Any]] = [rows.view(np.uint8).reshape(len(rows), SAMPLING_ROW.itemsize)]
    arrays += [getattr(sampling, name) for name in _SAMPLING]
    arrays += [] if sampling.allowed_mask is None else [sampling.allowed_mask]
    return [Tensor.of(array) for array in arrays]


def _sampling_of(tensors: list[Tensor]) -> SamplingBatch | None:
    if not tensors:
        return None
    rows, *arrays = [tensor.array() for tensor in tensors]
    if rows.ndim != 2 or rows.dtype != np.uint8 or rows.shape[1] != SAMPLING_ROW.itemsize:
        raise MalformedRankMessageError(f"{rows.dtype} of shape {rows.shape} are not rows of sampling options")
    if len(arrays) - len(_SAMPLING) not in (0, 1):
        raise MalformedRankMessageError("sampling options with an unexpected number of arrays")
    fields: dict[str, Any] = dict(zip((*_SAMPLING, "allowed_mask"), arrays, strict=False))
    return SamplingBatch(rows.view(SAMPLING_ROW)[:, 0] if len(rows) else np.zeros(0, SAMPLING_ROW), **fields)


def moved_tensors(batch: Batch, blocks: tuple[int, int], states: tuple[int, int]) -> list[Tensor]:
    """Return `RunStep.moved` for the rank with the given byte ranges [begin, end) of each block and of each state."""
    if not moves(batch):
        return []
    return [
        *_moved_tensors(batch.block_saves, batch.block_loads, *blocks),
        *_moved_tensors(batch.snapshot_saves, batch.snapshot_loads, *states),
    ]


def _moved_tensors(saves: BlockBytes | None, loads: BlockBytes | None, begin: int, end: int) -> list[Tensor]:
    none = np.zeros(0, np.int32)
    data = np.zeros((0, end - begin), np.uint8) if loads is None else loads.data[:, begin:end]
    ids = [none if moved is None else moved.block_ids for moved in (saves, loads)]
    return [*map(Tensor.of, ids), Tensor.of(data)]


def _moved_of(tensors: list[Tensor], block_bytes: int, state_bytes: int) -> dict[str, Any]:
    if not tensors:
        return {}
    if len(tensors) != 6:
        raise MalformedRankMessageError("moved blocks with an unexpected number of arrays")
    found: dict[str, Any] = {}
    for name, arrays, num_bytes in (("block", tensors[:3], block_bytes), ("snapshot", tensors[3:], state_bytes)):
        saves, loads, data = (tensor.array() for tensor in arrays)
        if data.ndim != 2 or data.shape[1] < num_bytes:
            raise MalformedRankMessageError(f"bytes of shape {data.shape} are not blocks of {num_bytes} bytes")
        found[f"{name}_saves"] = BlockBytes(saves, np.empty((len(saves), num_bytes), np.uint8))
        found[f"{name}_loads"] = BlockBytes(loads, data[:, :num_bytes])
    return found


def saved_blocks(number: int, batch: Batch) -> SavedBlocks | None:
    """Return the message that a rank sends after a step, or None if the step saves nothing."""
    blocks, states = batch.block_saves, batch.snapshot_saves
    if blocks is None or states is None or not len(blocks.block_ids) + len(states.block_ids):
        return None
    return SavedBlocks(number, Tensor.of(blocks.data), Tensor.of(states.data))


def batch_of(
    message: RunStep, inputs: tuple[NDArray[np.float32], ...] | None, block_bytes: int = 0, state_bytes: int = 0
) -> Batch:
    """Build a rank's batch from a message.

    inputs: values of the previous stage, or None for the inputs in the message.
    block_bytes, state_bytes: sizes of the rank's part.
    """
    if (len(message.arrays), len(message.optional)) != (len(_BATCH), len(_OPTIONAL)):
        raise MalformedRankMessageError("a step with an unexpected number of arrays")
    found: dict[str, Any] = {name: tensor.array() for name, tensor in zip(_BATCH, message.arrays, strict=True)}
    for name, tensor in zip(_OPTIONAL, message.optional, strict=True):
        found[name] = None if tensor is None else tensor.array()
    found["sampling"] = _sampling_of(message.sampling)
    found["domains"] = {name: rows.rows() for name, rows in message.domains.items()}
    if inputs is None:
        inputs = tuple(tensor.array_of(np.float32, 2) for tensor in message.inputs)
    return Batch(**found, inputs=inputs, **_moved_of(message.moved, block_bytes, state_bytes))


def proof_of(token: str, challenge: bytes) -> bytes:
    """Return a proof that a rank knows the token. The token itself is not sent."""
    return hmac.new(token.encode(errors="surrogateescape"), challenge, sha256).digest()


def hello(rank: int, token: str, challenge: bytes) -> Hello:
    return Hello(__version__, PROTOCOL, rank, proof_of(token, challenge))


def problem_with(message: Hello, token: str, challenge: bytes, ranks: Collection[int]) -> str | None:
    """Return the reason to refuse a rank, or None."""
    if not hmac.compare_digest(message.proof, proof_of(token, challenge)):
        return "its OCTAVO_CLUSTER_TOKEN is different; set the same on all machines"
    if (message.version, message.protocol) != (__version__, PROTOCOL):
        return f"it runs octavo {message.version}, the leader {__version__}: install the same version on all machines"
    if message.rank not in ranks:
        return f"rank {message.rank} is not one of {min(ranks)} to {max(ranks)}"
    return None
