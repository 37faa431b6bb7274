"""Writes safetensors files for tests, good ones and hostile ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_NAMES = {"f4": "F32", "f2": "F16", "u2": "BF16", "f8": "F64", "i8": "I64", "i4": "I32", "u1": "U8"}


def safetensors(tensors: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Write a whole file. Arrays of uint16 hold the bits of BF16 numbers."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, array in tensors.items():
        content = array.tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": _NAMES[array.dtype.str[1:]], "shape": list(array.shape), "data_offsets": offsets}
        data += content
    return with_header(json.dumps(header).encode(), data)


def with_header(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Write a file with any header, padded to 8 bytes as the format requires, and any stated length of it."""
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header) if length is None else length) + header + data
