"""Flattens an operation into the operands of a native kernel, whatever the operation.

The rule, which csrc/kernel.h repeats above `struct Args`: the dataclass fields are walked in order and
depth first, and each contributes by the type that it declares.

| field                | becomes                                                                    | None            |
|----------------------|----------------------------------------------------------------------------|-----------------|
| `Value`              | one input                                                                  | an absent input |
| `Parameter`          | one weight: plain float32 if it has one dimension, else a packed matrix    | absent weight   |
| tuple of Parameters  | its length as one int, then one weight each (absent where None)            |                 |
| tuple of floats      | one plain float32 weight                                                   | absent weight   |
| `int`, `bool`        | one int                                                                    | 0               |
| `float`              | one float                                                                  | 0.0             |
| `str`                | one int, its index in `KINDS`                                              | 0               |
| a nested dataclass   | its fields, in place                                                       | each as None    |

An operation that keeps a paged cache gets one more int, the last one: how the cache holds numbers, as the index in
`KV_DTYPES`. So a new operation needs a class in `graph/ops` and a file in csrc/kernels, and nothing here.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass, field

from octavo.config import KV_DTYPES, KVDtype
from octavo.errors import GraphError
from octavo.graph.ops import Op
from octavo.graph.values import Parameter, Value

# enum Kind of csrc/kernel.h
KINDS = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "softmax")

WeightOperand = Parameter | tuple[float, ...] | None


@dataclass(slots=True)
class Operands:
    """What a record of the program needs of one operation. layer: whose cache it uses, if any."""

    inputs: list[Value | None] = field(default_factory=list)
    weights: list[WeightOperand] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    layer: int | None = None


def lower(op: Op, kv_dtype: KVDtype = "float16") -> Operands:
    """The operands of `op`. Raises GraphError for a field that the rule does not know."""
    operands = Operands(layer=None if op.cache is None else op.cache.layer)
    _flatten(op, type(op), operands, op.name)
    if op.cache is not None:
        operands.ints.append(KV_DTYPES.index(kv_dtype))
    return operands


def _flatten(owner: object | None, cls: type, operands: Operands, name: str) -> None:
    for field_name, kind in _fields(cls):
        _append(None if owner is None else getattr(owner, field_name), kind, operands, f"{name}.{field_name}")


def _append(value: typing.Any, kind: typing.Any, operands: Operands, name: str) -> None:
    if kind is Value:
        operands.inputs.append(value)
    elif kind is Parameter:
        operands.weights.append(value)
    elif kind in (int, bool):
        operands.ints.append(int(value or 0))
    elif kind is float:
        operands.floats.append(float(value or 0.0))
    elif kind is str:
        if value is not None and value not in KINDS:
            raise GraphError(f"{name}: {value!r} is none of {', '.join(KINDS)}")
        operands.ints.append(KINDS.index(value or "none"))
    elif dataclasses.is_dataclass(kind):
        _flatten(value, typing.cast(type, kind), operands, name)
    elif typing.get_origin(kind) is tuple and typing.get_args(kind)[0] is float:
        operands.weights.append(value)
    elif typing.get_origin(kind) is tuple and _required(typing.get_args(kind)[0]) is Parameter:
        operands.ints.append(len(value))
        operands.weights.extend(value)
    else:
        raise GraphError(f"{name}: a field of type {kind} cannot be given to a native kernel")


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, typing.Any], ...]:
    """Name and type of each field, optional types without their None."""
    hints = typing.get_type_hints(cls)
    return tuple((f.name, _required(hints[f.name])) for f in dataclasses.fields(cls))


def _required(kind: typing.Any) -> typing.Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (required,) = (k for k in typing.get_args(kind) if k is not type(None))
        return required
    return kind
