"""`humming-kernels`: products of 5 to 256 rows with codes of up to eight bits, compiled at run time for each format.

Codes with a scale and a zero for each group are multiplied by rows in 16 bits; the library packs them in its own order,
which takes as much memory again as the planes of the matrix. One row, and very many, are left to our kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.plain import ProductEnd
from octavo.backends.torch.providers.grouped import grouped_codes
from octavo.backends.torch.providers.problems import Place, ProductProblem, missing, unfit

LEAST_ROWS, MOST_ROWS = 5, 256
_TYPES = {"e4m3": "float8e4m3", "e5m2": "float8e5m2", "e2m1": "float4e2m1", "e2m1_doubled": "float4e2m1"}
_GROUPS = (16, 32, 64, 128, 256)
_OUT, _IN = 64, 128  # of which a matrix has to be multiples


def absent(place: Place) -> str | None:
    """The reason why it cannot be used here at all, or None if it can."""
    return missing("humming", "humming-kernels") or unfit(place)


def can(problem: ProductProblem) -> str | None:
    """The reason against it, or None if it has this product."""
    out, width = problem.shape
    if reason := absent(problem.place):
        return reason
    if problem.rounds_inputs:
        return "the checkpoint has inputs rounded to eight bits, too"
    if problem.decode != "integer" and problem.decode not in _TYPES:
        return "its codes are entries of a table"
    if out % _OUT or width % _IN:
        return f"{out} x {width} is not a multiple of {_OUT} x {_IN}"
    if problem.group < width and (problem.group not in _GROUPS or width % problem.group):
        return f"groups of {problem.group} columns"
    if problem.group >= width and problem.is_affine:
        return "one zero for all columns of a row"
    return None


def extra_bytes(problem: ProductProblem) -> int:
    """The memory that its packed form takes beside the planes: codes, scales and zeros in 16 bits."""
    out, width = problem.shape
    groups = max(-(-width // problem.group), 1)
    return out * (width * problem.bits // 8 + 2 * groups * (2 if problem.is_affine else 1))


def prepared(p: Planes, dtype: torch.dtype) -> Any:
    """The matrix as a layer of the library.

    dtype: of rows, scales and zeros.
    """
    layers, ops = import_module("humming.layer"), import_module("humming.ops")
    out, width = p.shape
    bits, grouped = p.bits + p.high_bits, grouped_codes(p)
    has_zeros = grouped.zeros is not None
    config = {
        "dtype": _TYPES.get(p.decode, f"uint{bits}"),
        "group_size": p.group if p.group < width else 0,
        "has_zero_point": has_zeros,
        "is_fp_zero_point": has_zeros,
    }
    layer = layers.HummingLayer(shape_n=out, shape_k=width, weight_config=config, torch_dtype=dtype)
    layer = layer.to(p.codes.device)
    tensors = {"weight": ops.pack_weight(grouped.codes, bits), "weight_scale": grouped.scales.to(dtype)}
    if grouped.zeros is not None:
        tensors["zero_point"] = grouped.zeros.to(dtype)
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer


def linear(x: Tensor, layer: Any, end: ProductEnd) -> Tensor:
    """x [rows, in], in the order of the codes, times the matrix of `prepared`, with the end of the product."""
    is_free = end.out is not None and (end.residual is None or end.out.data_ptr() != end.residual.data_ptr())
    found: Tensor = layer(x.contiguous(), outputs=end.out if is_free else None)
    for term in (end.residual, end.bias):
        found = found if term is None else torch.add(found, term, out=end.out)
    return found
