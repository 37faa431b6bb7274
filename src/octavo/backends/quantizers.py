"""The native search for scales and codes of ggml's block types (`csrc/quantize`)."""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml import BLOCK_SIZES, stored_bytes
from octavo.quantization.packed import DenseWeight

MAX_VALUE = 65504.0  # scales and offsets are half floats
_LEAST_IMPORTANCE = 1e-4  # share of the mean, so that columns that calibration never saw still count a little


def quantizer_types() -> frozenset[str]:
    """Return the ggml types that `quantize` supports."""
    import octavo.backends.cpu._native as _native

    return frozenset(_native.quantizer_names())


def compute_threads(requested: int = 0) -> int:
    """Return the number of compute threads: `requested` if > 0, else one for each core that this process may use."""
    from octavo.backends.cpu.threads import plan_threads

    return plan_threads(requested).count


def quantize(
    type_name: str,
    x: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16],
    importance: NDArray[np.float32] | None = None,
    *,
    isa: str | None = None,
) -> NDArray[np.uint8]:
    """Quantize x [rows, k] to blocks of a ggml type: uint8, as in a GGUF file.

    The result is the same on every instruction set. Releases the GIL.

    x: float32, float16, or the bits of bfloat16. For TQ1_0 and TQ2_0, each block must consist of the values -d, 0 and
    d.
    importance: float32 [k], at least 0, the weight of each column in the squared error; None means equal weights.

    Raises ValueError for a type without a quantizer, a width that is not a whole number of blocks, and numbers that are
    not finite or larger than `MAX_VALUE`.
    """
    import octavo.backends.cpu._native as _native
    from octavo.backends.cpu.instruction_set import choose_isa

    out = np.empty(stored_bytes(type_name, x.shape), np.uint8)
    weights = None if importance is None else _checked_importance(importance, x.shape[1])
    x = x if x.flags.c_contiguous else x.copy()
    if not _native.quantize_rows(type_name, x, weights, out, choose_isa(isa)):
        _refuse_numbers(DenseWeight(x).dequantize())
    if type_name in ("TQ1_0", "TQ2_0"):
        _check_ternary(DenseWeight(x).dequantize())
    return out


def _refuse_numbers(x: NDArray[np.float32]) -> NoReturn:
    """Raise ValueError with the location of a NaN, an infinity, or a number beyond `MAX_VALUE`."""
    row, column = np.argwhere(~(np.abs(x) <= MAX_VALUE))[0]  # comparisons with NaN are false
    value = x[row, column]
    raise ValueError(f"row {row}, column {column} is {value:g}; numbers must be finite and at most {MAX_VALUE:g}")


def _check_ternary(x: NDArray[np.float32]) -> None:
    """Check that every block consists of the values -d, 0 and d, to float16 precision."""
    blocks = np.abs(x).reshape(-1, BLOCK_SIZES["TQ1_0"][0])
    scale = blocks.max(axis=1, keepdims=True)
    if not ((blocks == 0) | (np.abs(blocks - scale) <= scale * 2.0**-10)).all():
        raise ValueError("each block of 256 may contain only -d, 0 and d; TQ1_0 and TQ2_0 are for ternary models")


def _checked_importance(importance: NDArray[np.float32], columns: int) -> NDArray[np.float32]:
    if importance.shape != (columns,):
        raise ValueError(f"the importance has {importance.shape} entries for {columns} columns")
    mean = float(importance.mean(dtype=np.float64))
    if not math.isfinite(mean) or importance.min() < 0:
        raise ValueError("the importance of a column is negative or not finite")
    if mean == 0:
        return np.ones(columns, np.float32)
    scaled: NDArray[np.float32] = np.maximum(importance / np.float32(mean), np.float32(_LEAST_IMPORTANCE))
    return scaled
