"""Flattens any operation into the operands of a native kernel.

The rule is as follows; csrc/kernel.h repeats it above `struct Args`. The dataclass fields are walked in order and depth
first. Each field contributes operands under its name, depending on its declared type.

| field                | becomes                                                                    | None            |
|----------------------|----------------------------------------------------------------------------|-----------------|
| `Value`              | one input                                                                  | an absent input |
| `Parameter`          | one weight: a packed matrix if `Parameter.is_matrix`, else plain float32   | absent weight   |
| tuple of Parameters  | one tuple of weights (absent where None)                                   |                 |
| tuple of floats, ints| one plain float32 weight                                                   | absent weight   |
| `int`, `bool`        | one int                                                                    | 0               |
| `IndexArray`         | one int, its number among the index arrays of the program                  |                 |
| `RowDomain`          | one int, its number among the domains of the program                       |                 |
| `float`              | one float                                                                  | 0.0             |
| `str`                | one int, its index in `KINDS`                                              | 0               |
| a nested dataclass   | its fields, in place                                                       | each as None    |

An operation that keeps a paged cache gets two more operands after its fields: the int `kv_type`, an index in
`CPU_KV_DTYPES`, and the weight `key_mean`. `Program.add_record` compares the names with the kernel's signature, so a
new operation needs a class in `graph/ops` and a file in csrc/kernels, but no change here.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from octavo.config import CPU_KV_DTYPES
from octavo.errors import GraphError
from octavo.graph import passes
from octavo.graph.cache import KVCache
from octavo.graph.layer_formats import LayerFormat
from octavo.graph.ops.base import Op
from octavo.graph.values import SELECTED, IndexArray, Parameter, RowDomain, Value

# The passes over a graph for the kernels, in their order.
PASSES = (
    passes.fuse_attention,
    passes.fuse_gated_linears,
    passes.fuse_residual,
    passes.fuse_norm,
    passes.select_rows_early,
)
# enum Kind of csrc/kernel.h
KINDS = (
    *("none", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "quick_gelu", "below_zero"),
    *("softmax", "sparsemixer"),
)

WeightOperand = Parameter | tuple[float, ...] | tuple[int, ...] | None
_T = TypeVar("_T")
Named = list[tuple[str, _T]]


@dataclass(slots=True)
class Operands:
    """The operands of one operation, named after its fields, as `Program.add_record` takes them."""

    inputs: Named[Value | None] = field(default_factory=list)
    weights: Named[WeightOperand] = field(default_factory=list)
    ints: Named[int] = field(default_factory=list)
    floats: Named[float] = field(default_factory=list)
    tuples: Named[tuple[WeightOperand, ...]] = field(default_factory=list)
    numbers: Mapping[IndexArray | RowDomain, int] = field(default_factory=dict)  # by index array or domain


def lower(
    op: Op,
    layer_format: LayerFormat | None = None,
    numbers: Mapping[IndexArray | RowDomain, int] = MappingProxyType({SELECTED: 0}),
) -> Operands:
    """Return the operands of `op`.

    layer_format: format of the operation's cache; None means float16.
    numbers: numbers of index arrays and domains in the program.

    Raises GraphError for a field of an unsupported type.
    """
    operands = Operands(numbers=numbers)
    _flatten(op, type(op), operands, op.name)
    if isinstance(op.cache, KVCache):
        layer_format = layer_format or LayerFormat("float16")
        mean = layer_format.key_mean
        operands.ints.append(("kv_type", CPU_KV_DTYPES.index(layer_format.kv_dtype)))
        operands.weights.append(("key_mean", None if mean is None else tuple(mean.tolist())))
    return operands


def _flatten(owner: object | None, cls: type, operands: Operands, op: str) -> None:
    for name, kind in _fields(cls):
        _append(None if owner is None else getattr(owner, name), kind, operands, op, name)


def _append(value: typing.Any, kind: typing.Any, operands: Operands, op: str, name: str) -> None:
    if kind is Value:
        operands.inputs.append((name, value))
    elif kind is Parameter:
        operands.weights.append((name, value))
    elif kind in (int, bool):
        operands.ints.append((name, int(value or 0)))
    elif kind is float:
        operands.floats.append((name, float(value or 0.0)))
    elif kind in (IndexArray, RowDomain):
        operands.ints.append((name, operands.numbers[value]))
    elif kind is str:
        if value is not None and value not in KINDS:
            raise GraphError(f"{op}.{name} is {value!r}; it must be one of {', '.join(KINDS)}")
        operands.ints.append((name, KINDS.index(value or "none")))
    elif dataclasses.is_dataclass(kind):
        _flatten(value, typing.cast(type, kind), operands, op)
    elif typing.get_origin(kind) is tuple and typing.get_args(kind)[0] in (float, int):
        operands.weights.append((name, value))
    elif typing.get_origin(kind) is tuple and _required(typing.get_args(kind)[0]) is Parameter:
        operands.tuples.append((name, value))
    else:
        raise GraphError(f"{op}.{name}: a field of type {kind} cannot be given to a native kernel")


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, typing.Any], ...]:
    """Return the name and type of each field; an optional type is returned without its None."""
    hints = typing.get_type_hints(cls)
    return tuple((f.name, _required(hints[f.name])) for f in dataclasses.fields(cls))


def _required(kind: typing.Any) -> typing.Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (required,) = (k for k in typing.get_args(kind) if k is not type(None))
        return required
    return kind
