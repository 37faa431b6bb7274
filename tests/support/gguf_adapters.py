"""GGUF adapters with random factors, as llama.cpp's converter writes them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gguf
import numpy as np

from octavo.loader.gguf import open_gguf


def save_adapter(model: Path, path: Path, rank: int = 8) -> Path:
    """Write factors for all matrices in the blocks of a GGUF model, including stacks of experts, in its row order."""
    rng = np.random.default_rng(1)
    with closing(open_gguf(model)) as file:
        writer = gguf.GGUFWriter(path, file.metadata["general.architecture"])
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 4.0)
        for name, tensor in file.tensors.items():
            if name.startswith("blk.") and len(tensor.shape) > 1:
                *stack, out_features, in_features = tensor.shape
                for suffix, shape in (("a", (rank, in_features)), ("b", (out_features, rank))):
                    numbers = rng.standard_normal((*stack, *shape), np.float32) * np.float32(shape[1] ** -0.5)
                    writer.add_tensor(f"{name}.lora_{suffix}", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
