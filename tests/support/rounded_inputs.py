"""A numpy definition of rounded inputs: the rows that the weights of some checkpoints are multiplied by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.packed.float8 import e4m3, e4m3_values
from octavo.quantization.packed.inputs import LARGEST, InputKind


def coded_inputs(
    x: NDArray[np.float32], kind: InputKind, group: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return (codes [rows, cols], scales [rows, groups]) of x [rows, cols]: x / scale rounded, halves to even.

    The scale of a group of columns is its largest magnitude / 127 (int8) or / 448 (e4m3), and 1 if all are zero. Codes
    are the bytes of int8 or E4M3 numbers. A group that contains a non-finite number has a non-finite scale.

    group: columns that share a scale; 0 for the whole row.
    """
    rows, cols = x.shape
    step = group or max(cols, 1)
    padded = np.zeros((rows, -(-cols // step), step), np.float32)
    padded.reshape(rows, -1)[:, :cols] = x
    largest = np.abs(padded).max(axis=-1)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(LARGEST[kind])).astype(np.float32)
    scaled = (padded / scales[..., None]).reshape(rows, -1)[:, :cols]
    if kind == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8), scales
    return e4m3(scaled), scales


def rounded_inputs(x: NDArray[np.float32], kind: InputKind, group: int = 0) -> NDArray[np.float32]:
    """Return the numbers that the codes of `coded_inputs` represent."""
    codes, scales = coded_inputs(x, kind, group)
    values = codes.view(np.int8).astype(np.float32) if kind == "int8" else e4m3_values(codes)
    return values * np.repeat(scales, group or max(x.shape[1], 1), axis=1)[:, : x.shape[1]]
