"""The canonical weights that every checkpoint format is lowered to when it is loaded.

A format file turns its own packing into one of these and knows nothing about devices;
a backend packs these for its kernels and knows nothing about formats.
"""

from octavo.quantization.packed.base import Weight, arrays_of, concat, stack
from octavo.quantization.packed.codebook import CodebookFormat, CodebookWeight
from octavo.quantization.packed.dense import DENSE_TYPES, DenseWeight
from octavo.quantization.packed.float8 import Float8Format, Float8Weight
from octavo.quantization.packed.ggml import GGMLWeight
from octavo.quantization.packed.grouped import GroupedFormat, GroupedWeight

__all__ = [
    "DENSE_TYPES",
    "CodebookFormat",
    "CodebookWeight",
    "DenseWeight",
    "Float8Format",
    "Float8Weight",
    "GGMLWeight",
    "GroupedFormat",
    "GroupedWeight",
    "Weight",
    "arrays_of",
    "concat",
    "stack",
]
