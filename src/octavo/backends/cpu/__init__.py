"""The native CPU backend: graphs compiled to programs over the kernels of csrc/."""

from octavo.backends.cpu.compile import CompileOptions, choose_isa, compile  # noqa: A004 - the backend protocol's name
from octavo.backends.cpu.describe import describe
from octavo.backends.cpu.executor import CpuExecutor
from octavo.backends.cpu.sizes import sizes
from octavo.backends.memory import host_memory as memory

__all__ = ["CompileOptions", "CpuExecutor", "choose_isa", "compile", "describe", "memory", "sizes"]
