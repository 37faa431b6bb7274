"""Builds the tensors of a safetensors file from canonical weights. Shared by the writers of all formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.packed.grouped import packed

_TYPES = {"|u1": "U8", "|i1": "I8", "<i4": "I32", "<i8": "I64", "<f2": "F16", "<f4": "F32"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a safetensors file stores it.

    type_name: type as safetensors writes it.
    data: array of numpy's nearest type.
    """

    type_name: str
    data: NDArray[Any]


def stored_tensor(data: NDArray[Any], type_name: str | None = None) -> StoredTensor:
    """Return an array as a stored tensor, in its own type unless another is named."""
    data = np.ascontiguousarray(data) if data.ndim else data
    return StoredTensor(type_name or _TYPES[data.dtype.str], data)


def words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack codes [n, count] into 32-bit words [n, count * bits / 32], the first code in the lowest bits.

    Raises ValueError if they do not fill the last word.
    """
    if codes.shape[-1] * bits % 32:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole 32-bit words")
    return np.ascontiguousarray(packed(codes, bits)).view("<i4")
