"""A GPU of tests: torch on CPU tensors, with a memory of its own that has a limit."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.memory import MemoryBudget
from octavo.backends.torch.compile import TorchBackend


@dataclass(frozen=True, slots=True)
class SmallDevice(TorchBackend):
    """With so many bytes of memory that can be used."""

    usable: int = 1 << 40

    @property
    def uses_main_memory(self) -> bool:
        return False

    def total_memory(self) -> int:
        return MemoryBudget.with_usable(self.usable)

    def memory(self) -> MemoryBudget:
        return MemoryBudget(MemoryBudget.with_usable(self.usable))
