"""The native CPU backend: graphs compiled to programs over the kernels of csrc/."""

from octavo.backends.cpu.compile import CompileOptions, choose_isa, compile  # noqa: A004 - the backend protocol's name
from octavo.backends.cpu.executor import CpuExecutor, RecordTime

__all__ = ["CompileOptions", "CpuExecutor", "RecordTime", "choose_isa", "compile"]
