"""LoRA adapters for requests of the Python API, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.errors import UsageError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter's name and path: a PEFT folder or a GGUF file. Raises UsageError.

    lora_int_id: vLLM's number of the adapter, 1 or more; ignored.
    scale: factor by which the adapter's effect is multiplied.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise UsageError(f"lora_name is {self.lora_name!r:.80}; it must be a string", param="lora_request")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise UsageError(f"lora_int_id is {self.lora_int_id!r:.80}; it must be 1 or more", param="lora_request")
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            raise UsageError(f"lora_path is {self.lora_path!r:.80}; it must be a path", param="lora_request")
