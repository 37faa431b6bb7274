"""`humming-kernels`: products of 5 to 256 rows with codes of up to eight bits, compiled at run time for each format.

Codes with a scale and a zero for each group are multiplied by 16-bit rows. The library packs them in its own order,
which takes the same amount of memory again as the planes of the matrix. A single row, and very many rows, are left to
our kernels. A stack of experts is one layer: its rows are sorted by expert, and the experts' offsets stay on the
device.
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
from octavo.backends.torch.quantized import matrix_of

LEAST_ROWS, MOST_ROWS = 5, 256
_TYPES = {"e4m3": "float8e4m3", "e5m2": "float8e5m2", "e2m1": "float4e2m1", "e2m1_doubled": "float4e2m1"}
_GROUPS = (16, 32, 64, 128, 256)
_OUT, _IN = 64, 128  # the shape of a matrix must be multiples of these


def absent(place: Place) -> str | None:
    """Return the reason why the library cannot be used here at all, or None if it can."""
    return missing("humming", "humming-kernels") or unfit(place)


def can(problem: ProductProblem) -> str | None:
    """Return the reason why the library cannot compute this product, or None if it can."""
    out, width = problem.shape
    if reason := absent(problem.place):
        return reason
    if problem.rounds_inputs:
        return "the checkpoint also rounds inputs to eight bits"
    if problem.decode != "integer" and problem.decode not in _TYPES:
        return "its codes are entries of a table"
    if out % _OUT or width % _IN:
        return f"{out} x {width} is not a multiple of {_OUT} x {_IN}"
    if problem.group < width and (problem.group not in _GROUPS or width % problem.group):
        return f"groups of {problem.group} columns"
    if problem.group >= width and problem.is_affine:
        return "one zero for all columns of a row"
    return _reason_beside(problem)


def _reason_beside(problem: ProductProblem) -> str | None:
    """Return the reason why the library cannot take one of the mixture's other stacks, or None."""
    for other in problem.beside:
        reason = "its weights are plain numbers" if other is None else can(other)
        if reason is not None:
            return f"another stack of the mixture: {reason}"
    return None


def extra_bytes(problem: ProductProblem) -> int:
    """Return the bytes that the packed form takes in addition to the planes: codes, and 16-bit scales and zeros."""
    out, width = problem.shape
    groups = max(-(-width // problem.group), 1)
    of_row = width * problem.bits // 8 + 2 * groups * (2 if problem.is_affine else 1)
    return max(problem.experts, 1) * out * of_row


def prepared(p: Planes, dtype: torch.dtype) -> Any:
    """Return the matrix or stack of matrices as a layer of the library.

    dtype: type of rows, scales and zeros.
    """
    *experts, out, width = p.shape
    if experts:  # one at a time: 32-bit codes are four to eight times as large as the planes
        parts = [_tensors(matrix_of(p, expert), dtype) for expert in range(experts[0])]
        tensors = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    else:
        tensors = _tensors(p, dtype)
    has_zeros = "zero_point" in tensors
    config = {
        "dtype": _TYPES.get(p.decode, f"uint{p.bits + p.high_bits}"),
        "group_size": p.group if p.group < width else 0,
        "has_zero_point": has_zeros,
        "is_fp_zero_point": has_zeros,
    }
    layer = import_module("humming.layer").HummingLayer(
        shape_n=out,
        shape_k=width,
        weight_config=config,
        num_experts=experts[0] if experts else None,
        torch_dtype=dtype,
    )
    layer = layer.to(p.codes.device)
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer


def _tensors(p: Planes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a matrix [out, in] as the library's tensors, by name."""
    grouped = grouped_codes(p)
    packed = import_module("humming.ops").pack_weight(grouped.codes, p.bits + p.high_bits)
    found = {"weight": packed, "weight_scale": grouped.scales.to(dtype)}
    return found if grouped.zeros is None else found | {"zero_point": grouped.zeros.to(dtype)}


def linear(x: Tensor, layer: Any, end: ProductEnd) -> Tensor:
    """Multiply x [rows, in], with columns in the order of the codes, by the matrix of `prepared`, and add the product's
    end.
    """
    is_free = end.out is not None and (end.residual is None or end.out.data_ptr() != end.residual.data_ptr())
    found: Tensor = layer(x.contiguous(), outputs=end.out if is_free else None)
    for term in (end.residual, end.bias):
        found = found if term is None else torch.add(found, term, out=end.out)
    return found


def expert_linear(x: Tensor, layer: Any, ends: Tensor) -> Tensor:
    """Multiply x [pairs, in], sorted by expert, by each expert's matrix of `prepared` -> [pairs, out].

    ends: int32 [experts + 1], where the pairs of each expert begin, and the end of the last. Later rows are not
    written.
    """
    found: Tensor = layer(x.contiguous(), expert_layout=ends, compute_config={"gemm_type": "grouped_contiguous"})
    return found
