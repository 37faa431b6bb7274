"""Detects weights with NaN or infinity before a model is evaluated or used as a teacher."""

from __future__ import annotations

from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from octavo.errors import NumericalError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.hub import resolve_model
from octavo.quantization.packed import DenseWeight

_PIECE = 1 << 18  # numbers per piece, so that their bits stay in the processor's cache
# By type: the integer type of its bits, the bits without the sign, and the bits of infinity.
_BITS = {"F32": ("<u4", 0x7FFFFFFF, 0x7F800000), "F16": ("<u2", 0x7FFF, 0x7C00), "BF16": ("<u2", 0x7FFF, 0x7F80)}


def check_weights(model: str, revision: str | None = None) -> None:
    """Raise NumericalError naming the first float tensor with a NaN or an infinity.

    Checking the logits would not be enough: a gate of minus infinity becomes zero, and some rows of the embedding may
    never be read. The scales of quantized tensors are not checked.
    """
    with closing(open_checkpoint(resolve_model(model, revision=revision))) as checkpoint:
        for name in checkpoint.weights:
            if checkpoint.weights.info(name).type_name not in _BITS:
                continue
            weight = checkpoint.weights[name]
            if isinstance(weight, DenseWeight) and not _is_finite(weight):
                raise NumericalError(
                    f"{checkpoint.path}: tensor {name!r} contains NaN or infinity, so answers would be meaningless; "
                    "use an intact model"
                )


def _is_finite(weight: DenseWeight) -> bool:
    kind, magnitude, infinity = _BITS[weight.type_name]
    bits: NDArray[np.unsignedinteger] = weight.data.reshape(-1).view(kind)
    pieces = (bits[start : start + _PIECE] for start in range(0, bits.size, _PIECE))
    return all((piece & magnitude).max() < infinity for piece in pieces)
