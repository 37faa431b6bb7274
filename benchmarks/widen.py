"""Writes a small llama model with wider rows that computes the same, for types in blocks of 256.

    python benchmarks/widen.py MODEL.gguf RESULT.gguf

Models whose rows are no multiple of 256, such as SmolLM2-135M with 576, cannot use K types. The result has rows of
the next multiple: zeros next to the weights, heads of zeros, and norms and their epsilon by the ratio of the widths, so
that its logits equal the model's up to rounding. `dither.py` makes a MODEL with float16 weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.compress.source import SourceModel, SourceTensor, open_source
from octavo.loader.gguf_writer import OutputTensor, write_gguf

BLOCK = 256


def widened(values: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the values padded with zeros in each direction."""
    return np.pad(values, [(0, wide - narrow) for wide, narrow in zip(shape, values.shape, strict=True)])


def sizes(model: SourceModel) -> tuple[dict[int, int], int, int]:
    """Return the new size for each old size of a tensor, and the new numbers of heads and of kv heads."""
    keys = model.metadata
    hidden, heads, kv_heads = (
        int(keys[f"llama.{name}"])  # type: ignore[arg-type]
        for name in ("embedding_length", "attention.head_count", "attention.head_count_kv")
    )
    wide = -(-hidden // BLOCK) * BLOCK
    size = hidden // heads
    new_heads, group = wide // size, heads // kv_heads
    if wide % size or new_heads % group:
        raise SystemExit(f"heads of {size} in groups of {group} do not fill {wide} columns; take another model")
    return {hidden: wide, kv_heads * size: new_heads // group * size}, new_heads, new_heads // group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    with open_source(arguments.model) as model:
        if model.metadata["general.architecture"] != "llama":
            raise SystemExit(f"{arguments.model} is no llama model")
        new_sizes, heads, kv_heads = sizes(model)
        hidden, wide = next(iter(new_sizes.items()))
        eps = "llama.attention.layer_norm_rms_epsilon"
        changed = {
            "llama.embedding_length": np.uint32(wide),
            "llama.attention.head_count": np.uint32(heads),
            "llama.attention.head_count_kv": np.uint32(kv_heads),
            eps: np.float32(model.metadata[eps] * hidden / wide),  # type: ignore[operator]
        }

        def shape_of(tensor: SourceTensor) -> tuple[int, ...]:
            rows = tensor.shape[:-1] if tensor.name.startswith(("token_embd", "output.")) else ()
            return (*rows, *(new_sizes.get(size, size) for size in tensor.shape[len(rows) :]))

        def chunks(tensor: SourceTensor) -> Iterator[NDArray[np.uint8]]:
            values = tensor.make().dequantize()
            if tensor.name.endswith("_norm.weight"):
                values = values * np.float32((hidden / wide) ** 0.5)
            kind = np.float32 if tensor.type_name == "F32" else np.float16
            yield widened(values, shape_of(tensor)).astype(kind).reshape(-1).view(np.uint8)
            tensor.release()

        tensors = [
            OutputTensor(t.name, t.type_name, shape_of(t), lambda t=t: chunks(t))  # type: ignore[misc]
            for t in model.tensors
        ]
        write_gguf(arguments.result, {**model.metadata, **changed}, tensors)


if __name__ == "__main__":
    main()
