"""Writes a quantized GGUF model with float16 weights that are on no grid, for the comparison of quantized types.

The only weights at hand may already be quantized. In that case their own type, and every finer type of its kind, would
quantize them again with almost no error. Here each block of 32 values gets uniform noise as wide as the distance
between its two nearest different values, which is how its weights were spread before quantization. The result is a
separate model, slightly worse than the file, and serves as the reference for its quantized forms.

    python benchmarks/dither.py MODEL.gguf RESULT.gguf
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.compress.source import SourceTensor, open_source
from octavo.loader.gguf_writer import OutputTensor, write_gguf
from octavo.quantization.packed import DENSE_TYPES

BLOCK = 32


def dithered(values: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float16]:
    """Add the noise to values [..., columns], where columns is a multiple of 32."""
    blocks = values.reshape(-1, BLOCK)
    gaps = np.diff(np.sort(blocks, axis=1), axis=1)
    gaps[gaps <= 1e-6 * np.abs(blocks).max(axis=1, keepdims=True)] = np.inf
    steps = gaps.min(axis=1, keepdims=True)
    steps[~np.isfinite(steps)] = 0
    noise = rng.uniform(-0.5, 0.5, blocks.shape).astype(np.float32) * steps
    return (blocks + noise).reshape(values.shape).astype(np.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    with open_source(arguments.model) as model:

        def chunks(tensor: SourceTensor) -> Iterator[NDArray[np.uint8]]:
            values = dithered(tensor.make().dequantize(), rng)
            tensor.release()
            yield values.reshape(-1).view(np.uint8)

        def plain(tensor: SourceTensor) -> Iterator[NDArray[np.uint8]]:
            yield tensor.make().data.reshape(-1).view(np.uint8)

        tensors = [
            OutputTensor(t.name, t.type_name, t.shape, lambda t=t: plain(t))  # type: ignore[misc]
            if t.type_name in DENSE_TYPES
            else OutputTensor(t.name, "F16", t.shape, lambda t=t: chunks(t))  # type: ignore[misc]
            for t in model.tensors
        ]
        write_gguf(arguments.result, {**model.metadata, "general.file_type": np.uint32(1)}, tensors)


if __name__ == "__main__":
    main()
