"""The interface of an operation: operands, shape rule, cost and numpy definition."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from octavo.batch import Array, Batch
from octavo.config import KVDtype
from octavo.errors import GraphError
from octavo.graph.cache import KVCache, StateCache
from octavo.graph.cuts import WHOLE, Cut
from octavo.graph.ops.kv_rounding import round_keys, round_values
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, IndexArray, Parameter, RowDomain, Value

if TYPE_CHECKING:
    from octavo.graph.ops.low_rank import LowRank

Observer = Callable[[Parameter, Array, int | None], None]
"""Called with a matrix, the rows [rows, in] that it multiplies and, for a stack of matrices, the matrix's number."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The numbers that a step's cost depends on.

    context: mean number of tokens that a request has in the cache after the step, including the new ones.
    kv_element_bytes: bytes of one number in the cache, including its share of the bytes of a scale.
    element_bytes: bytes of one number of a value; 4 for a backend that computes in float32.
    further_rows: rows of domains other than tokens and outputs.
    """

    tokens: int
    requests: int
    outputs: int
    context: int
    kv_element_bytes: float = 2
    element_bytes: int = 4
    further_rows: Mapping[RowDomain, int] = dataclasses.field(default_factory=dict, hash=False)

    def rows(self, rows: RowDomain) -> int:
        if rows is TOKENS:
            return self.tokens
        return self.outputs if rows is OUTPUTS or rows is LOGITS else self.further_rows.get(rows, 0)


@dataclass(frozen=True, slots=True)
class RowNeed:
    """The arrays that an operation reads about the rows of a domain (`octavo.batch.DomainRows`).

    components: components of each position, or 0 if it reads no positions.
    starts: it reads where sequences start.
    cached: it reads and writes a cache of the domain, using lengths and slots.
    """

    domain: RowDomain
    components: int = 0
    starts: bool = False
    cached: bool = False


@dataclass(frozen=True, slots=True)
class IndexNeed:
    """The index array that an operation reads: `width` rows of `source` for each row.

    keeps: True if -1 may stand for no source row. A step may then leave out the array, as if it were -1 everywhere.
    """

    index: IndexArray
    source: RowDomain
    width: int = 1
    keeps: bool = False


@dataclass(slots=True)
class LayerCache:
    """One layer's paged cache in numpy. Slot s is token s % block_size of block s // block_size.

    kv_dtype: the type to round to; None means that numbers are stored as exactly as they are computed.
    key_mean: subtracted from int8 keys before rounding, [num_kv_heads, key_dim].
    """

    keys: Array  # [num_slots, num_kv_heads, key_dim]
    values: Array  # [num_slots, num_kv_heads, value_dim]
    block_size: int
    group: int = 0  # the cache group that gives the layer its block tables and slots
    kv_dtype: KVDtype | None = None
    key_mean: Array | None = None

    @classmethod
    def empty(cls, cache: KVCache, num_blocks: int, block_size: int, dtype: DTypeLike, group: int = 0) -> LayerCache:
        """Create a cache filled with NaN, so that reading a slot before writing it is noticed."""
        shape = (num_blocks * block_size, cache.num_kv_heads)
        keys, values = (np.full((*shape, dim), np.nan, dtype) for dim in (cache.key_dim, cache.value_dim))
        return cls(keys, values, block_size, group)

    def write(self, slots: NDArray[np.int32], keys: Array, values: Array) -> None:
        """Write keys and values [tokens, num_kv_heads, key_dim or value_dim] to the slots of their tokens."""
        self.keys[slots] = round_keys(keys, self.kv_dtype, self.key_mean)
        self.values[slots] = round_values(values, self.kv_dtype)

    def slots(self, block_table: NDArray[np.int32], begin: int, end: int) -> NDArray[np.int64]:
        """Return the slots [end - begin] of tokens [begin, end) of the sequence with this block table."""
        token = np.arange(begin, end)
        return block_table[token // self.block_size].astype(np.int64) * self.block_size + token % self.block_size


@dataclass(slots=True)
class Evaluation:
    """One step of the reference backend, for the numpy definitions of operations.

    dtype: float32 or float64; all arithmetic is done in it.
    weights: dequantized weights in `dtype`.
    states: arrays of operations with a `StateCache`, by its index, [slots, *shape] each.
    values: computed values, [rows, cols].
    observer: called for every product.
    adapters: parts of the loaded adapters, by slot and by weight name.
    """

    batch: Batch
    dtype: DTypeLike
    weights: Mapping[Parameter, Array]
    caches: Mapping[int, LayerCache]
    states: Mapping[int, list[Array]]
    values: dict[Value, Array]
    observer: Observer | None = None
    adapters: Mapping[int, Mapping[str, LowRank]] = dataclasses.field(default_factory=dict)

    def product(self, x: Array, weight: Parameter, index: int | None = None) -> Array:
        """Multiply x [rows, in] by the transpose of a matrix, or of matrix `index` of a stack, and call the
        observer.
        """
        if self.observer is not None:
            self.observer(weight, x, index)
        matrix = self.weights[weight] if index is None else self.weights[weight][index]
        product: Array = x @ matrix.T
        return product


@dataclass(frozen=True, slots=True)
class Op(ABC):
    """Base of all operations.

    Fields of type `Value` are inputs, those of type `Parameter` are weights (None where optional), everything else is a
    static attribute. A backend may walk the fields in order instead of knowing each operation.
    row_wise: each output row depends only on the same row of the inputs.
    needs_whole_texts: a step must contain all tokens of a sequence.
    element_flops: FLOPs per output element.
    cut: how the operation is divided among ranks (`octavo.graph.cuts`).
    """

    row_wise: ClassVar[bool] = False
    needs_whole_texts: ClassVar[bool] = False
    element_flops: ClassVar[int] = 0
    cut: ClassVar[Cut[Any]] = WHOLE

    @property
    def name(self) -> str:
        """The class name in snake case: `rms_norm`, `moe`, `fused_linear`."""
        return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__).lower()

    @property
    def inputs(self) -> tuple[Value, ...]:
        return tuple(o for o in self._operands() if isinstance(o, Value))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The operation's parameters, each once even if two fields contain it."""
        return tuple(dict.fromkeys(o for o in self._operands() if isinstance(o, Parameter)))

    @abstractmethod
    def infer_shape(self) -> tuple[RowDomain, int]:
        """Return rows and columns of the output. Raises GraphError naming shapes that do not fit."""

    def flops(self, sizes: StepSizes) -> int:
        """Return the floating-point operations of a step; a multiply-add counts as two, a transcendental function as
        one.
        """
        rows, cols = self.infer_shape()
        return self.element_flops * sizes.rows(rows) * cols

    @abstractmethod
    def evaluate(self, step: Evaluation) -> Array:
        """Compute the output [rows, cols] in numpy. This defines the operation."""

    def weight_fraction(self, parameter: Parameter, sizes: StepSizes) -> float:  # noqa: ARG002
        """Return the fraction of a weight's bytes that a step reads."""
        return 1.0

    @property
    def products(self) -> tuple[Parameter, ...]:
        """The matrices whose products with activations make up most of the work and are therefore worth quantizing.

        Tables, output heads and routers are not included: quantizing them costs more than it saves.
        """
        return ()

    @property
    def cache(self) -> KVCache | StateCache | None:
        """The cache that the operation keeps from step to step, or another operation's cache that it reads (see
        `owns_cache`).
        """
        return None

    @property
    def owns_cache(self) -> bool:
        """False for an operation that reads what another operation has written to that operation's cache in the same
        step.
        """
        return self.cache is not None

    @property
    def row_needs(self) -> tuple[RowNeed | IndexNeed, ...]:
        """The arrays of domains that the operation reads in addition to its inputs."""
        return ()

    @property
    def is_gate(self) -> bool:
        """True if the output comes from a gate. A backend may store it as the codes that a product reads."""
        return False

    def multiplied_with(self, value: Value) -> tuple[Parameter, ...]:  # noqa: ARG002
        """Return the weights of the products that take this input unchanged; empty if anything else in the operation
        reads it.
        """
        return ()

    @property
    def in_place(self) -> tuple[Value, ...]:
        """Inputs whose memory the output may reuse if they are not needed later.

        This is possible if each output element depends on no other element of that input.
        """
        return ()

    def with_inputs(self, rename: Callable[[Value], Value]) -> Op:
        """Return the same operation on other values."""
        return dataclasses.replace(self, **{name: rename(value) for name, value in self._fields_of(Value)})

    def with_parameters(self, rename: Callable[[Parameter], Parameter]) -> Op:
        """Return the same operation with other weights."""
        return dataclasses.replace(self, **{name: rename(value) for name, value in self._fields_of(Parameter)})

    @property
    def named_inputs(self) -> dict[str, Value]:
        """The inputs by field name."""
        return dict(self._fields_of(Value))

    def _fields_of(self, kind: type[_T]) -> list[tuple[str, _T]]:
        fields = ((name, getattr(self, name)) for name in _field_names(type(self)))
        return [(name, value) for name, value in fields if isinstance(value, kind)]

    def _operands(self) -> list[object]:
        operands: list[object] = []
        for name in _field_names(type(self)):
            operand = getattr(self, name)
            operands.extend(operand if isinstance(operand, tuple) else (operand,))
        return operands


@cache
def _field_names(op: type[Op]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(op))


def require(condition: bool, message: str) -> None:
    """Raise GraphError(message) unless `condition`; the builder adds the operation and layer."""
    if not condition:
        raise GraphError(message)


def require_parameter(parameter: Parameter | None, *shape: int) -> None:
    """Raise GraphError unless the parameter has this shape, or is None."""
    if parameter is not None:
        require(parameter.shape == shape, f"{parameter.name} is {list(parameter.shape)}, not {list(shape)}")


def describe(value: Value) -> str:
    """Describe a value's shape, for example `[tokens, 576]`."""
    return f"[{value.rows.name}, {value.cols}]"
