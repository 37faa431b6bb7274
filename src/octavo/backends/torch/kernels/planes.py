"""Canonical weights as planes: codes of one width each, with scales and zeros in separate tensors.

A block has 128 columns and takes 16 * bits bytes in a plane of `bits`-bit codes. With S = 128 * bits / 8 columns in a
set, byte j of a block holds the code of column i * S + j from bit i * bits upwards. Each set is therefore contiguous,
and a kernel reads 16 bytes at a time without any shuffles. Codes of 3, 5 and 6 bits use two planes of 2 + 1, 4 + 1 and
4 + 2 bits; codes of 7 bits use one plane of 8. Nothing is rounded: `dequantize` gives the float32 numbers of the
canonical weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.torch.coded import INPUT_GROUPS, CodeForm
from octavo.backends.torch.kernels.ggml_planes import fields_of
from octavo.quantization.ggml_blocks import E2M1_DOUBLED
from octavo.quantization.packed import CodebookWeight, Float8Weight, GGMLWeight, GroupedWeight, Weight
from octavo.quantization.packed.grouped import unpacked

BLOCK = 128

_PLAIN_FIELDS = ("type_name", "bits", "group", "decode", "high_bits", "scale_bits", "super_group", "zero", "inputs")

# Code width -> widths of its two planes.
_SPLIT = {1: (1, 0), 2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 7: (8, 0), 8: (8, 0)}


@dataclass(frozen=True, slots=True)
class Planes:
    """A weight of shape [*, out, in]: scale * (value of code - zero) + minimum, in float32.

    decode: the value of a code: `integer` is the code itself; `table` an entry of the table; `e4m3`, `e5m2` and `e2m1`
    the number with these bits; `e2m1_doubled` twice that number. E2M1 codes come with their table as well, for products
    in plain torch. The scale of a column is scales[column // group], times supers[column // super_group] if present;
    the minimum is computed in the same way.
    scale_bits: how scales are stored: `plain` numbers, `e4m3` bits or `e8m0` exponents.
    inputs: the form in which the checkpoint quantizes the rows to be multiplied, or None if they are not rounded.
    """

    type_name: str
    shape: tuple[int, ...]
    codes: Tensor  # uint8 [*, out, blocks * 16 * bits]; int8 if they are multiplied without decoding
    bits: int
    scales: Tensor  # float16, float32, int8 or uint8 [*, out, groups]
    group: int
    decode: str = "integer"
    high: Tensor | None = None  # uint8 [*, out, blocks * 16 * high_bits]
    high_bits: int = 0
    scale_bits: str = "plain"
    supers: Tensor | None = None  # float16 or float32 [*, out, super groups]
    super_group: int = 1
    zero: int = 0
    zeros: Tensor | None = None  # uint8 [*, out, groups], instead of `zero`
    minima: Tensor | None = None  # like scales
    super_minima: Tensor | None = None
    table: Tensor | None = None  # float32 [16]
    column_order: Tensor | None = field(default=None)  # int64 [in]: the weight's column for column j of the codes
    inputs: CodeForm | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str) -> Planes:
        """Return a copy on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, **moved)

    def ordered(self, x: Tensor) -> Tensor:
        """Return x [rows, in] with its columns in the order of the codes."""
        return x if self.column_order is None else x[:, self.column_order]


_OF_ALL_ROWS = ("table", "column_order")


def joined_rows(parts: Sequence[Planes]) -> Planes | None:
    """Stack matrices with the same input as [sum of out, in]. Return None if they have different kinds of codes."""
    first = parts[0]
    for other in parts[1:]:
        is_alike = first.tensors.keys() == other.tensors.keys() and all(
            getattr(first, name) == getattr(other, name) for name in _PLAIN_FIELDS
        )
        if not is_alike or any(not _fits(name, first.tensors[name], other.tensors[name]) for name in first.tensors):
            return None
    found: dict[str, Any] = {
        name: torch.cat([p.tensors[name] for p in parts]) for name in first.tensors if name not in _OF_ALL_ROWS
    }
    return replace(first, shape=(sum(p.shape[0] for p in parts), first.shape[1]), **found)


def rows_apart(p: Planes, counts: Sequence[int]) -> list[Planes]:
    """Split a matrix into views with these numbers of rows."""
    split = {name: torch.split(x, [*counts]) for name, x in p.tensors.items() if name not in _OF_ALL_ROWS}
    parts: list[dict[str, Any]] = [{name: pieces[i] for name, pieces in split.items()} for i in range(len(counts))]
    return [replace(p, shape=(n, p.shape[1]), **part) for n, part in zip(counts, parts, strict=True)]


def _fits(name: str, a: Tensor, b: Tensor) -> bool:
    """Return True if these tensors of two matrices can be concatenated."""
    if name in _OF_ALL_ROWS:
        return torch.equal(a, b)
    return a.dtype == b.dtype and a.shape[1:] == b.shape[1:]


def planes_of(weight: Weight) -> Planes | None:
    """Convert a canonical matrix, or a stack of them, to planes on the host. Return None if no kernel reads its type.

    No kernel reads plain numbers, groups of fewer than 16 columns, or a stack whose experts have different column
    orders.
    """
    found: Planes | None = None
    if isinstance(weight, GroupedWeight):
        found = _grouped(weight)
    elif isinstance(weight, CodebookWeight):
        found = _codebook(weight)
    elif isinstance(weight, Float8Weight):
        found = _float8(weight)
    elif isinstance(weight, GGMLWeight):
        found = _ggml(weight)
    return found


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).copy())


def _pack(codes: NDArray[np.uint8], bits: int) -> Tensor:
    """Pack codes [*, in], one per byte, into a plane."""
    sets = 8 // bits
    width = codes.shape[-1]
    padded = np.zeros((*codes.shape[:-1], -(-width // BLOCK) * BLOCK), np.uint8)
    padded[..., :width] = codes
    parts = padded.reshape(*codes.shape[:-1], -1, sets, BLOCK // sets)
    shifts = (np.arange(sets, dtype=np.uint8) * np.uint8(bits))[:, None]
    joined = np.bitwise_or.reduce(parts << shifts, axis=-2)
    return _tensor(joined.reshape(*codes.shape[:-1], -1))


def _coded(codes: NDArray[np.uint8], bits: int) -> dict[str, Any]:
    """Return the fields for the codes [*, in], one per byte."""
    low, high = _SPLIT[bits]
    found: dict[str, Any] = {"bits": low, "high_bits": high}
    found["codes"] = _pack(codes & np.uint8((1 << low) - 1), low)
    if high:
        found["high"] = _pack(codes >> np.uint8(low), high)
    return found


def _grouped(w: GroupedWeight) -> Planes | None:
    width = w.shape[-1]
    group = w.group or width
    order = w.column_order
    if group < 16 or (order is not None and order.ndim > 1 and (order != order.reshape(-1, width)[0]).any()):
        return None
    codes = _coded(unpacked(w.codes, w.bits), w.bits)
    inputs, zero = None, 0 if w.minima is not None else w.zero
    is_plain = all(x is None for x in (w.group, w.zeros, w.minima, order))
    if w.inputs is not None and len(w.shape) == 2 and is_plain:
        inputs, zero = CodeForm(w.inputs), 0
        codes["codes"] = (codes["codes"] ^ w.zero).view(torch.int8)
    return Planes(
        w.type_name,
        w.shape,
        scales=_tensor(w.scales),
        group=group,
        zero=zero,
        zeros=None if w.zeros is None else _tensor(w.zeros),
        minima=None if w.minima is None else _tensor(w.minima),
        column_order=None if order is None else _tensor(order.reshape(-1, width)[0].astype(np.int64)),
        inputs=inputs,
        **codes,
    )


def _codebook(w: CodebookWeight) -> Planes | None:
    if w.block < 16 or w.block & (w.block - 1):
        return None
    codes = np.stack([w.codes & 15, w.codes >> 4], axis=-1).reshape(w.shape)
    return Planes(
        w.type_name,
        w.shape,
        scales=_tensor(w.scales),
        group=w.block,
        decode=_decode_of(np.asarray(w.table, np.float32)),
        scale_bits="plain" if w.row_scales is None else "e4m3",
        supers=None if w.row_scales is None else _tensor(w.row_scales),
        super_group=w.shape[-1],
        table=torch.tensor(w.table, dtype=torch.float32),
        **_coded(codes, 4),
    )


def _float8(w: Float8Weight) -> Planes | None:
    rows, width = w.shape[-2:]
    group = w.block_columns or width
    if group % 16:
        return None
    scales = np.repeat(w.scales, w.block_rows or rows, axis=-2)[..., :rows, :]
    inputs = None
    if w.inputs is not None and w.kind == "E4M3" and len(w.shape) == 2 and (group >= width or group in INPUT_GROUPS):
        inputs = CodeForm(w.inputs, 0 if group >= width else group)
    fields: dict[str, Any] = {"scales": _tensor(scales), "group": group, "decode": w.kind.lower(), "inputs": inputs}
    return Planes(w.type_name, w.shape, **fields, **_coded(w.data, 8))


def _ggml(w: GGMLWeight) -> Planes | None:
    found = fields_of(w.type_name, w.data)
    if found is None:
        return None
    codes, bits = found.pop("codes"), found.pop("bits")
    decode = _decode_of(found["table"]) if "table" in found else "integer"
    for name, value in found.items():
        found[name] = _tensor(value) if isinstance(value, np.ndarray) else value
    return Planes(w.type_name, w.shape, decode=decode, **found, **_coded(codes, bits))


def _decode_of(table: NDArray[np.float32]) -> str:
    """Return the `decode` field for codes with this table. Kernels decode E2M1 without the table."""
    for name, factor in (("e2m1", 0.5), ("e2m1_doubled", 1.0)):
        if np.array_equal(table, E2M1_DOUBLED * np.float32(factor)):
            return name
    return "table"
