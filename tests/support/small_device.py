"""A fake GPU for tests: torch on CPU tensors, with its own limited memory."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.memory import MemoryBudget
from octavo.backends.torch.compile import TorchBackend


@dataclass(frozen=True, slots=True)
class SmallDevice(TorchBackend):
    """A device with this many bytes of usable memory."""

    usable: int = 1 << 40

    @property
    def uses_main_memory(self) -> bool:
        return False

    def total_memory(self) -> int:
        return MemoryBudget.with_usable(self.usable)

    def memory(self) -> MemoryBudget:
        return MemoryBudget(MemoryBudget.with_usable(self.usable))
