"""The stored tensors of one layer, and code that formats share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.models._reading import ConfigReader
from octavo.quantization.packed import DenseWeight, Float8Weight, GGMLWeight, Weight, WeightInfo
from octavo.quantization.packed.grouped import unpacked

FLOATS = ("F16", "BF16", "F32")

_NUMPY = {"I64": "<i8", "I32": "<i4", "I8": "i1", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NAME = re.compile(r"(.+?)\.(weight(?:\..+)?|[^.]+)")  # `weight` has parts of its own in bitsandbytes


class StoredTensors(Protocol):
    """An opened file of tensors."""

    @property
    def tensors(self) -> Mapping[str, WeightInfo]:
        """The type and shape of every tensor by name."""

    def array(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A weight that is built from stored tensors on demand.

    tensors: names of the stored tensors.
    like: a weight of this type and shape without its numbers.
    make: builds the weight itself.
    """

    name: str
    tensors: tuple[str, ...]
    like: Weight
    make: Callable[[], Weight]


@dataclass(frozen=True, slots=True)
class Layer:
    """The stored tensors of one layer.

    parts: their full names by the last part of the name, such as {"qweight": "model.layers.0.mlp.up_proj.qweight"}.
    """

    name: str
    parts: Mapping[str, str]
    file: StoredTensors

    def type_name(self, part: str) -> str:
        """Return the stored type of a tensor. Raises ModelLoadError if there is no such tensor."""
        if part not in self.parts:
            raise ModelLoadError(f"layer {self.name!r:.80} has no tensor {part!r}, only {', '.join(self.parts):.100}")
        return self.file.tensors[self.parts[part]].type_name

    def shape(self, part: str, *types: str) -> tuple[int, ...]:
        """Return the shape of a tensor with one of these types. Raises ModelLoadError."""
        if (found := self.type_name(part)) not in types:
            raise self.error(part, f"has the type {found}; it must be {' or '.join(types)}")
        return self.file.tensors[self.parts[part]].shape

    def matrix(self, part: str, *types: str) -> tuple[int, int]:
        """Return the shape of a two-dimensional tensor."""
        shape = self.shape(part, *types)
        if len(shape) != 2 or 0 in shape:
            raise self.error(part, f"has the shape {list(shape)}; it must be a matrix")
        return shape[0], shape[1]

    def check(self, part: str, shape: tuple[int, ...], *types: str) -> None:
        """Raise ModelLoadError unless the tensor has this shape and one of these types."""
        if (found := self.shape(part, *types)) != shape:
            raise self.error(part, f"has the shape {list(found)}; it must be {list(shape)}")

    def error(self, part: str, reason: str) -> ModelLoadError:
        return ModelLoadError(f"tensor {self.parts[part]!r:.100} {reason}")

    def array(self, part: str) -> NDArray[Any]:
        """Return the numbers of a tensor. BF16 and E8M0 become float32; E4M3 and E5M2 stay bytes."""
        type_name, info = self.type_name(part), self.file.tensors[self.parts[part]]
        data: NDArray[Any] = self.bytes(part).view(_NUMPY.get(type_name, "u1")).reshape(info.shape)
        if type_name == "F8_E8M0":
            data = np.ldexp(np.float32(1), data.astype(np.int32) - 127)
        return DenseWeight(data).dequantize() if type_name == "BF16" else data

    def bytes(self, part: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor of any type."""
        self.type_name(part)
        return np.ascontiguousarray(self.file.array(self.parts[part]))

    def scales_like(self, part: str, *shape: int) -> NDArray[Any]:
        """Return an array of this shape without numbers, in the type that `array` returns for a tensor of scales."""
        return hollow(*shape, dtype="f2" if self.type_name(part) == "F16" else "f4")

    def lower(
        self, like: Weight, make: Callable[[], Weight], name: str = "weight", parts: tuple[str, ...] = ()
    ) -> Lowered:
        """Describe the weight `name` of this layer, built from `parts`, or from all of its tensors except the bias."""
        tensors = tuple(self.parts[part] for part in parts or self.parts if part != "bias")
        return Lowered(f"{self.name}.{name}", tensors, like, make)


def layers(file: StoredTensors) -> Iterator[Layer]:
    """Group the tensors of a file by layer."""
    found: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        if match := _NAME.fullmatch(name):
            found.setdefault(match[1], {})[match[2]] = name
    return (Layer(name, parts, file) for name, parts in found.items())


def choice(config: ConfigReader, key: str, supported: tuple[object, ...], default: object = None) -> Any:
    """Return a configured value after checking that it is supported.

    Raises ModelLoadError naming key, value and what is supported.
    """
    value = config.values.get(config.prefix + key)
    value = default if value is None else value
    if value is None:
        raise ModelLoadError(f"{config.prefix}{key} is missing; supported: {', '.join(map(str, supported))}")
    if type(value) is not type(supported[0]) or value not in supported:
        raise config.error(key, value, f"is not supported; supported: {', '.join(map(str, supported))}")
    return value


def matches(config: ConfigReader, key: str, pattern: str, name: str) -> bool:
    """Return True if a regular expression in a configuration matches the beginning of a layer's name.

    Raises ModelLoadError for an expression that is invalid or could take long.
    """
    if len(pattern) > 500 or re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 4:
        raise config.error(key, pattern, "has repeated groups or more than four repetitions, which could take long")
    try:
        return re.match(pattern, name[:200]) is not None
    except re.error as error:
        raise config.error(key, pattern, f"is not a regular expression: {error}") from error


def group_size(config: ConfigReader, key: str, width: int) -> int | None:
    """Return the number of columns that share a scale, or None if the configured size is -1, the whole row.

    Raises ModelLoadError if the size does not divide `width`.
    """
    size = config.integer(key, low=-1)
    if size != -1 and (size < 1 or width % size):
        raise config.error(key, size, f"must be -1 or a divisor of the width {width}")
    return None if size == -1 else size


def hollow(*shape: int, dtype: str = "u1") -> NDArray[Any]:
    """Return an array of this shape that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def column_order(layer: Layer, part: str, width: int, group: int | None) -> NDArray[np.int32] | None:
    """Return the columns sorted by the group that the tensor gives for each, or None if they are already in order.

    Raises ModelLoadError if the groups do not all have `group` columns.
    """
    if part not in layer.parts:
        return None
    layer.check(part, (width,), "I32", "I64")
    groups = layer.array(part)
    order = np.argsort(groups, kind="stable")
    wanted = np.arange(width) // (group or width)
    if not np.array_equal(groups[order], wanted):
        raise layer.error(part, f"does not put {group or width} columns into each group")
    return None if np.array_equal(groups, wanted) else order.astype(np.int32)


def block_shape(config: ConfigReader, key: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block, or None if the key is missing. Raises ModelLoadError."""
    value = config.values.get(config.prefix + key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise config.error(key, value, "must be two whole numbers, the rows and columns of a block")
    return value[0], value[1]


def float8(layer: Layer, part: str, block: tuple[int, int] | None, *, rounds_inputs: bool) -> Lowered:
    """Describe a weight of eight-bit floats with the scales in `part`.

    There is a single scale, or one per row, or one per block of rows and columns.

    rounds_inputs: the checkpoint was made for inputs that are rounded to eight bits as well.
    """
    rows, columns = layer.matrix("weight", "F8_E4M3", "F8_E5M2")
    kind: Literal["E4M3", "E5M2"] = "E5M2" if layer.type_name("weight") == "F8_E5M2" else "E4M3"
    layouts: dict[tuple[int, ...], tuple[int | None, int | None]] = {(rows,): (1, None), (rows, 1): (1, None)}
    if block is not None:
        layouts[-(-rows // block[0]), -(-columns // block[1])] = block
    layouts |= dict.fromkeys(((), (1,), (1, 1)), (None, None))
    found = layer.shape(part, *FLOATS, "F8_E8M0")
    if found not in layouts:
        raise layer.error(part, f"has the shape {list(found)}; it must be {' or '.join(str(list(s)) for s in layouts)}")
    layout, shape = layouts[found], (*found, 1, 1)[: max(2, len(found))]

    def make(data: NDArray[Any], scales: NDArray[Any]) -> Weight:
        inputs: Literal["e4m3"] | None = "e4m3" if rounds_inputs else None
        return Float8Weight(kind, data, scales.astype(np.float32).reshape(shape), *layout, inputs)

    like = make(hollow(rows, columns), hollow(*shape))
    return layer.lower(like, lambda: make(layer.array("weight"), layer.array(part)))


def mxfp4(layer: Layer, codes: str, exponents: str, shape: tuple[int, ...]) -> Weight:
    """Return the weight as ggml's MXFP4 blocks. They hold the same numbers, but their nibbles are in a different order.

    codes: a tensor with two columns per byte, the first in the low four bits.
    exponents: a tensor of this shape, [*, out, in / 32].
    """
    pairs = unpacked(layer.bytes(codes).reshape(*shape, 16), 4)
    blocks = [layer.bytes(exponents).reshape(*shape, 1), pairs[..., :16] | pairs[..., 16:] << 4]
    return GGMLWeight("MXFP4", np.concatenate(blocks, -1).reshape(*shape[:-1], -1))
