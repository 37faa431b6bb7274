"""Writes an adapter in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Source: the classes LoraConfig and LoraLayer of PEFT 0.21 for the keys, names and shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.adapters.peft import CONFIG_NAME, PREFIX, WEIGHTS_NAME
from octavo.backends.adapted_modules import AdaptedModule
from octavo.loader.atomic_file import write_text
from octavo.loader.safetensors_writer import SafeTensor, write_safetensors

Factors = Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
"""A [rank, in] and B [out, rank] by module."""


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """The content of `adapter_config.json`.

    base: name of the model that it was trained for.
    """

    base: str
    rank: int
    alpha: float
    modules: Sequence[AdaptedModule]
    names_are_whole: bool = False  # the last names would also mean modules that were not trained

    def config(self) -> dict[str, object]:
        """Return the keys of the file."""
        names = {m.name if self.names_are_whole else m.name.rpartition(".")[2] for m in self.modules}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(names),
            "bias": "none",
            "fan_in_fan_out": any(module.is_transposed for module in self.modules),
            "use_rslora": False,
            "use_dora": False,
            "inference_mode": True,
        }


def write_adapter(folder: Path, description: AdapterDescription, factors: Factors) -> int:
    """Write both files to an existing folder, and return the size of the tensors in bytes.

    Raises ModelWriteError naming the file.
    """
    tensors = []
    for module in description.modules:
        for letter, array in zip("AB", factors[module.name], strict=True):
            name = f"{PREFIX}{module.name}.lora_{letter}.weight"
            tensors.append(tensor_of(name, array))
    write_safetensors(folder / WEIGHTS_NAME, tensors)
    write_text(folder / CONFIG_NAME, json.dumps(description.config(), indent=2) + "\n")
    return sum(tensor.nbytes for tensor in tensors)


def tensor_of(name: str, array: NDArray[np.float32]) -> SafeTensor:
    """Return the array as a float32 tensor to be stored under this name."""
    data = np.ascontiguousarray(array, np.float32)
    return SafeTensor(name, "F32", data.shape, lambda: [data.reshape(-1).view(np.uint8)])
