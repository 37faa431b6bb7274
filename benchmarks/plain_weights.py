"""Copies a GGUF file with its quantized tensors as F32 or F16, for `octavo eval`.

    python benchmarks/plain_weights.py MODEL.gguf COPY.gguf F32

Run with a Python that has gguf. With such weights the activations are not rounded to int8 either, so that
the copy measures everything else: norms, rotations, attention, cache.
"""

from __future__ import annotations

import argparse

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

KEYS_OF_THE_WRITER = ("general.architecture", "general.file_type")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("copy")
    parser.add_argument("type", choices=["F32", "F16"], help="type of matrices; vectors are always F32")
    options = parser.parse_args()
    source = GGUFReader(options.model)
    target = GGUFWriter(options.copy, source.fields["general.architecture"].contents())
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in KEYS_OF_THE_WRITER:
            kind = field.types[0]
            element = field.types[-1] if kind == GGUFValueType.ARRAY else None
            target.add_key_value(field.name, field.contents(), kind, sub_type=element)
    for tensor in source.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)])
        half = options.type == "F16" and values.ndim > 1
        target.add_tensor(tensor.name, values.astype(np.float16 if half else np.float32))
    target.write_header_to_file()
    target.write_kv_data_to_file()
    target.write_tensors_to_file()
    target.close()


if __name__ == "__main__":
    main()
