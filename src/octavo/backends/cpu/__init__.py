"""The native CPU backend: graphs compiled to programs over the kernels of csrc/.

The members of `octavo.backends.cpu.backend` are loaded when one of them is first used, so that a command that needs
only the native library, such as `octavo quantize`, starts without them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.errors import OctavoError

try:
    from octavo.backends.cpu import _native as _native  # here, so that the error is one line
except ImportError as error:
    raise OctavoError(f"the native library cannot be loaded ({error}): reinstall octavo") from error

if TYPE_CHECKING:
    from octavo.backends.cpu.backend import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # The import system, too, asks for names: those of modules of this package, which it then loads itself.
    if name.startswith("_") or name == "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("octavo.backends.cpu.backend"), name)
