"""Products with quantized weights in plain torch: each tile of rows is dequantized, multiplied and discarded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.coded import rounded
from octavo.backends.torch.kernels.planes import BLOCK, Planes

_TILE = 1 << 22  # most numbers dequantized at a time


def matrix_of(p: Planes, index: int) -> Planes:
    """Return one matrix of a stack. Its tensors are views."""
    found: dict[str, Any] = {n: x[index] for n, x in p.tensors.items() if n not in ("table", "column_order")}
    return replace(p, shape=p.shape[1:], **found)


def dequantized(p: Planes, dtype: torch.dtype, rows: Tensor | slice | None = None) -> Tensor:
    """Dequantize a matrix, some of its rows, or a stack. Columns are in the order of the codes."""

    def own(x: Tensor) -> Tensor:
        return x if rows is None else x[rows]

    width = p.shape[-1]
    code = codes_of(p, rows)[..., :width]
    value = _values(p, code)
    if p.decode == "integer":
        value = value - (spread(own(p.zeros).float(), p.group, width) if p.zeros is not None else float(p.zero))
    scale = spread(scales_of(p, own(p.scales)), p.group, width)
    if p.supers is not None:
        scale = scale * spread(own(p.supers).float(), p.super_group, width)
    value = value * scale
    if p.minima is not None:
        minimum = spread(own(p.minima).float(), p.group, width)
        if p.super_minima is not None:
            minimum = minimum * spread(own(p.super_minima).float(), p.super_group, width)
        value = value + minimum
    return value.to(dtype)


def codes_of(p: Planes, rows: Tensor | slice | None = None) -> Tensor:
    """Return the codes of a matrix, some of its rows, or a stack, one per byte, up to the end of the last block."""

    def own(x: Tensor) -> Tensor:
        return x if rows is None else x[rows]

    code = _plane_codes(own(p.codes), p.bits)
    return code if p.high is None else code | (_plane_codes(own(p.high), p.high_bits) << p.bits)


def whole(p: Planes, dtype: torch.dtype) -> Tensor:
    """Return all numbers. Columns are in the order of the weight."""
    found = dequantized(p, dtype)
    if p.column_order is None:
        return found
    ordered = torch.empty_like(found)
    ordered[..., p.column_order] = found
    return ordered


def product(x: Tensor, p: Planes) -> Tensor:
    """Multiply x [rows, in] by the transpose of a matrix [out, in]; x is rounded if the matrix requires codes."""
    x = x if p.inputs is None else rounded(x, p.inputs)
    x, (features, width) = p.ordered(x), p.shape
    step = max(_TILE // width, 1)
    tiles = [
        functional.linear(x, dequantized(p, x.dtype, slice(begin, begin + step))) for begin in range(0, features, step)
    ]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-1)


def _plane_codes(plane: Tensor, bits: int) -> Tensor:
    """Return one plane's codes, one per byte: see `octavo.backends.torch.kernels.planes`."""
    if bits == 8:
        return plane
    sets = 8 // bits
    blocks: Tensor = plane.reshape(*plane.shape[:-1], -1, 1, BLOCK // sets)
    shifts = torch.arange(sets, dtype=torch.uint8, device=plane.device)[:, None] * bits
    codes: Tensor = (blocks >> shifts) & (2**bits - 1)
    return codes.flatten(-3)


def _values(p: Planes, code: Tensor) -> Tensor:
    if p.table is not None:
        return p.table[code.int()]
    if p.decode == "integer":
        return code.float()
    kind = torch.float8_e4m3fn if p.decode == "e4m3" else torch.float8_e5m2
    return code.contiguous().view(kind).float()


def scales_of(p: Planes, scales: Tensor) -> Tensor:
    """Return these scales of a weight in float32, before super-group scales are applied."""
    if p.scale_bits == "e4m3":
        return scales.view(torch.float8_e4m3fn).float()
    if p.scale_bits == "e8m0":  # for tables stored as doubled numbers
        return torch.exp2(scales.double() - 128).float()
    return scales.float()


def spread(numbers: Tensor, group: int, width: int) -> Tensor:
    """Repeat the number of each group of columns for every column of the group."""
    return numbers.repeat_interleave(group, dim=-1)[..., :width] if numbers.shape[-1] * group > 1 else numbers
