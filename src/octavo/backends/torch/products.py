"""The choice between our kernels and the library for a product, based on its weight, its inputs and the number of rows.

Imported only where kernels run. The same input always takes the same path, so that results are repeatable.

| rows | plain weight | codes, 16-bit inputs | int8 codes | E4M3 codes |
|---|---|---|---|---|
| 1 | each row by itself | one row | each row by itself | each row by itself, or 16 |
| 2 to 4 | each row by itself | few rows, columns in parts | each row by itself | each row by itself, or 16 |
| 5 to 16 | library | few rows, columns in parts | tile of 16 rows | tile of 16 rows |
| 17 to 64 | library | tile of 32 or 64 rows | tile of 64 rows | library, or tile of 64 rows |
| 65 and more | library | unpacked once, then the library | tile of 128 rows | library, or tile of 128 or 64 rows |

E4M3 codes with scales for groups of columns use the tile of 16 rows even for a single row, and the tile of 64 instead
of 128 from 65 rows on. The library's product of E4M3 codes has whole-row scales and bfloat16 results, and is used on
compute capability 9 and 10. Where rows are computed one by one, gate, up and activation are one launch (`gate`). Where
a row must not depend on the number of rows (`repeats`), one tile serves all numbers of rows, and the library is not
used. The tile sizes are constants next to their kernels (`kernels/dense.py`, `linear.py`, `coded_linear.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends.torch.coded import CodedRows, Find, nowhere
from octavo.backends.torch.kernels.coded_linear import coded_linear
from octavo.backends.torch.kernels.dense import dense_gate, dense_linear
from octavo.backends.torch.kernels.dequantize import dequantize
from octavo.backends.torch.kernels.gate import coded_rows
from octavo.backends.torch.kernels.linear import linear as packed_linear
from octavo.backends.torch.kernels.linear import most_rows
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.kernels.vector import vector_product
from octavo.backends.torch.plain import ProductEnd, scaled_linear
from octavo.backends.torch.plain import linear as library_linear

_FEW_ROWS = 4  # up to this many rows, plain weights use our kernel, because libraries are slow there
_SCALED_ROWS = 17  # from this many rows on, the library multiplies E4M3 codes


def linear(
    x: Tensor | CodedRows, matrix: Planes | Tensor, end: ProductEnd, *, repeats: bool, find: Find = nowhere
) -> Tensor:
    """Return x [rows, in] @ matrix [out, in].T with its end -> [rows, out].

    x: codes only if the matrix requires them.
    repeats: a row's result must not depend on other rows or on their number.
    find: finds memory for use while the product runs.
    """
    terms = (end.bias, end.residual)
    if isinstance(matrix, Planes) and matrix.inputs is not None:
        rows = x if isinstance(x, CodedRows) else coded_rows(x, matrix.inputs, find=find)
        if not repeats and _suits_library(rows, matrix, end.dtype):
            return scaled_linear(rows, matrix.codes, matrix.scales, end, find)
        return coded_linear(rows, matrix, *terms, dtype=end.dtype, out=end.out, deterministic=repeats)
    assert isinstance(x, Tensor)
    if isinstance(matrix, Planes):
        x = matrix.ordered(x)
        if repeats or len(x) <= most_rows(matrix):
            return packed_linear(x, matrix, *terms, dtype=end.dtype, out=end.out, deterministic=repeats)
        matrix = dequantize(matrix, x.dtype)
    elif repeats or len(x) <= _FEW_ROWS:
        return dense_linear(x, matrix, *terms, dtype=end.dtype, out=end.out, deterministic=repeats)
    return library_linear(x, matrix, end)


def gate(x: Tensor, matrix: Planes | Tensor, bias: Tensor | None, kind: str, out: Tensor | None) -> Tensor | None:
    """Compute kind(gate) * up in one launch, or return None if that is not possible.

    The matrix has the rows of gate, followed by the rows of up. One launch is possible for 16-bit inputs whose rows are
    computed one by one.
    """
    if isinstance(matrix, Tensor):
        return dense_gate(x, matrix, bias, kind, out) if len(x) <= _FEW_ROWS else None
    if len(x) != 1 or matrix.inputs is not None:
        return None
    out = torch.empty((1, matrix.shape[0] // 2), dtype=x.dtype, device=x.device) if out is None else out
    return vector_product(out, matrix.ordered(x), matrix, bias, kind=kind)


def _suits_library(x: CodedRows, p: Planes, dtype: torch.dtype | None) -> bool:
    """Return True if the library can multiply these codes; it is not called for types and devices that it refuses."""
    if x.form != ("e4m3", 0) or len(x) < _SCALED_ROWS or (dtype or x.dtype) != torch.bfloat16:
        return False
    is_even = all(size % 16 == 0 for size in p.shape)
    return is_even and x.codes.is_cuda and torch.cuda.get_device_capability(x.codes.device)[0] in (9, 10)
