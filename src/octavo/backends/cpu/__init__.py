"""The native CPU backend: graphs compiled to programs over the kernels of csrc/.

Its members are loaded when they are first used: what needs the native library alone, as `octavo quantize` does, starts
in half the time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.errors import OctavoError

try:
    from octavo.backends.cpu import _native as _native  # here, so that the error is one line
except ImportError as error:
    raise OctavoError(f"the native library cannot be loaded ({error}): install octavo again") from error

if TYPE_CHECKING:
    from octavo.backends.cpu.backend import (
        PAGES_WEIGHTS,
        CompileOptions,
        CpuExecutor,
        choose_isa,
        compile,  # noqa: A004 - the backend protocol's name
        describe,
        expected_paging,
        join_group,
        memory,
        rates,
        sizes,
    )

__all__ = [
    "PAGES_WEIGHTS",
    "CompileOptions",
    "CpuExecutor",
    "choose_isa",
    "compile",
    "describe",
    "expected_paging",
    "join_group",
    "memory",
    "rates",
    "sizes",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("octavo.backends.cpu.backend"), name)
