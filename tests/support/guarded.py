"""Arrays next to pages that trap: code that reads or writes beyond them ends the test at once."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_ACCESS = 0
T = TypeVar("T")


def guarded(array: NDArray[Any], *, at_start: bool = False, alignment: int = 1) -> NDArray[Any]:
    """Return a copy of `array` that ends just before a trapping page, or begins just after one (`at_start`).

    alignment: the copy's address is a multiple of this many bytes, so up to one byte less may lie before the page.
    """
    page = mmap.PAGESIZE
    payload = max(-(-array.nbytes // page), 1) * page
    memory = mmap.mmap(-1, payload + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (base, base + page + payload):
        if _LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), _NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    size = -(-array.nbytes // alignment) * alignment
    offset = page if at_start else page + payload - size
    copy: NDArray[Any] = np.ndarray(array.shape, array.dtype, memory, offset)
    copy[...] = array
    return copy


def guard_arrays(instance: T, *, at_start: bool = False) -> T:
    """Return a copy of a dataclass with all of its arrays `guarded`."""
    assert is_dataclass(instance)
    arrays = {f.name: getattr(instance, f.name) for f in fields(instance)}
    return replace(  # type: ignore[type-var, return-value]
        instance,
        **{name: guarded(a, at_start=at_start) for name, a in arrays.items() if isinstance(a, np.ndarray)},
    )
