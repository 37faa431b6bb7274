"""The canonical weights that every checkpoint format is lowered to when it is loaded.

A format file turns its own packing into one of these and knows nothing about devices;
a backend packs these for its kernels and knows nothing about formats.
"""

from octavo.quantization.packed.base import Weight
from octavo.quantization.packed.dense import DenseWeight
from octavo.quantization.packed.ggml import GGMLWeight
from octavo.quantization.packed.join import concat, stack

__all__ = ["DenseWeight", "GGMLWeight", "Weight", "concat", "stack"]
