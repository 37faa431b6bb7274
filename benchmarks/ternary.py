"""Writes a GGUF model whose layers have ternary weights in float16, for the types TQ1_0 and TQ2_0.

    python benchmarks/ternary.py MODEL.gguf RESULT.gguf

Each block of 256 values of a matrix of the layers becomes -d, 0 and d: zero below 0.7 times the mean magnitude, and d
the mean magnitude of the rest (Li et al., "Ternary weight networks", arXiv 1605.04711). All other tensors stay as
they are. A model that was not trained so predicts next to nothing then; it is for the comparison of programs. Rows must
be multiples of 256: see `widen.py`, whose zeros count for no mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.compress.source import SourceTensor, open_source
from octavo.loader.gguf_writer import OutputTensor, write_gguf

BLOCK = 256


def ternary(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Make values [..., columns] ternary, where columns is a multiple of 256."""
    blocks = values.reshape(-1, BLOCK)
    sizes = np.abs(blocks)
    tiny = np.finfo(np.float32).tiny
    mean = sizes.sum(axis=1, keepdims=True) / np.maximum((sizes > 0).sum(axis=1, keepdims=True), 1)
    large = sizes > 0.7 * mean + tiny
    scales = (sizes * large).sum(axis=1, keepdims=True) / np.maximum(large.sum(axis=1, keepdims=True), 1)
    return (np.sign(blocks) * large * scales.astype(np.float16)).reshape(values.shape).astype(np.float16)


def is_rounded(tensor: SourceTensor) -> bool:
    return tensor.name.startswith("blk.") and len(tensor.shape) > 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    with open_source(arguments.model) as model:
        for tensor in model.tensors:
            if is_rounded(tensor) and tensor.shape[-1] % BLOCK:
                raise SystemExit(f"{tensor.name} has rows of {tensor.shape[-1]} values, no multiple of {BLOCK}")

        def chunks(tensor: SourceTensor) -> Iterator[NDArray[np.uint8]]:
            values = tensor.make().dequantize()
            kind = np.float32 if tensor.type_name == "F32" else np.float16
            made = ternary(values) if is_rounded(tensor) else values.astype(kind)
            yield made.reshape(-1).view(np.uint8)
            tensor.release()

        tensors = [
            OutputTensor(t.name, "F32" if t.type_name == "F32" else "F16", t.shape, lambda t=t: chunks(t))  # type: ignore[misc]
            for t in model.tensors
        ]
        write_gguf(arguments.result, {**model.metadata, "general.file_type": np.uint32(1)}, tensors)


if __name__ == "__main__":
    main()
